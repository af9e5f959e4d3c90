//! AMX: the matrix unit of Intel's processors since Sapphire Rapids. A tile is 16 rows of 64 bytes; one instruction adds the
//! product of 16 x 32 and 32 x 16 bf16 to 16 x 16 sums in f32, sixteen times the work of a dot product of vectors.
//!
//! Operands lie as [`super::product`] has them anyway: rows of pairs on the left, steps of pairs on the right. The unit has
//! a state of its own: the system must have given leave ([`is_here`]), and the shapes of the tiles are set around the work
//! of a thread ([`Configured`]). The instructions are not in stable Rust's intrinsics, so that they are written in assembly;
//! compiled code never touches tiles by itself, and no product leaves anything in them for the next.

use super::product::Extents;
use super::{Simd, cpuid};
use bytemuck::Zeroable;
use std::arch::asm;
use std::sync::LazyLock;

/// Rows of a tile, and units of 32 bits in one of its rows.
pub const TILE: usize = 16;
/// Bytes of a unit.
const UNIT_BYTES: usize = 4;
/// Sums that are held at once: tiles 0 to 5, `HELD_ROWS` below each other; 6 is for `A` and 7 for `B`.
const HELD_ROWS: usize = 3;
const HELD_COLUMNS: usize = 2;

/// Whether the processor has the unit, and the system lets this process use it.
pub fn is_here() -> bool {
    /// Leaf 7 of `cpuid` says so in its register `edx`.
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    static IS_HERE: LazyLock<bool> = LazyLock::new(|| {
        let has = cpuid(7).edx;
        cfg!(target_os = "linux") && has & BF16 != 0 && has & TILES != 0 && permitted()
    });
    *IS_HERE
}

/// Asks Linux for the state of tiles, 8 KiB more for each thread: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: a system call without pointers; it changes nothing but the permission.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// The shapes of the eight tiles, as `ldtilecfg` reads them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// No tiles: the state in which a thread begins.
    const NONE: Shapes = Shapes { palette: 0, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };

    /// `rows` of `A` and of the sums, `units` of them along the inner extent.
    const fn of(rows: usize, units: usize) -> Shapes {
        let mut shapes = Shapes { palette: 1, ..Shapes::NONE };
        let mut tile = 0;
        while tile < 8 {
            shapes.rows[tile] = if tile == 7 { units } else { rows } as u8;
            shapes.row_bytes[tile] = UNIT_BYTES as u16 * if tile == 6 { units } else { TILE } as u16;
            tile += 1;
        }
        shapes
    }

    /// The shapes of this thread's tiles.
    fn current() -> Shapes {
        let mut shapes = Shapes::NONE;
        // SAFETY: writes the 64 bytes of `shapes`; made only where the unit is.
        unsafe { asm!("sttilecfg [{}]", in(reg) &mut shapes, options(nostack, preserves_flags)) };
        shapes
    }

    /// Gives this thread's tiles these shapes; what they held is lost.
    fn set(&self) {
        // SAFETY: reads the 64 bytes of `self`, which are a valid configuration; tiles are no registers of compiled code.
        unsafe {
            match self.palette {
                0 => asm!("tilerelease", options(nomem, nostack, preserves_flags)),
                _ => asm!("ldtilecfg [{}]", in(reg) self, options(readonly, nostack, preserves_flags)),
            }
        }
    }
}

const WHOLE: Shapes = Shapes::of(TILE, TILE);

/// While it lives, this thread's tiles are whole ones; then they are what they were.
pub struct Configured(Shapes);

impl Configured {
    /// # Safety
    /// [`is_here`].
    pub unsafe fn begin() -> Self {
        let before = Shapes::current();
        WHOLE.set();
        Configured(before)
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// The start of a matrix of elements of 4 bytes, a `*const` or `*mut` of them, and the distance of its rows in bytes.
#[derive(Clone, Copy)]
pub struct Matrix<P> {
    pub at: P,
    pub row_bytes: usize,
}

macro_rules! from {
    ($pointer:ty) => {
        impl<T> Matrix<$pointer> {
            /// From a row and a column on.
            fn from(self, row: usize, column: usize) -> Self {
                Matrix { at: self.at.wrapping_byte_add(row * self.row_bytes + column * UNIT_BYTES), ..self }
            }
        }
    };
}

from!(*const T);
from!(*mut T);

/// `C = A B` of pairs of bf16, or with `add` `C += A B`: `a` has `rows` of `steps` pairs, `b` `steps` rows of `columns` pairs,
/// a multiple of [`TILE`]. Every element of `c` is summed in the order of the steps, whatever the other extents.
///
/// # Safety
/// The matrices are as large as that, `c` overlaps neither other, and a [`Configured`] of this thread lives.
pub unsafe fn product<U>(extents: Extents, a: Matrix<*const U>, b: Matrix<*const U>, c: Matrix<*mut f32>, add: bool) {
    let Extents { rows, columns, steps } = extents;
    let (whole_rows, whole_steps) = (rows - rows % TILE, steps - steps % TILE);
    let mut is_whole = true;
    for (row, count, held) in [(0, whole_rows, TILE), (whole_rows, rows - whole_rows, rows % TILE)] {
        for (step, steps, units) in [(0, whole_steps / TILE, TILE), (whole_steps, 1, steps % TILE)] {
            if count == 0 || steps == 0 || units == 0 {
                continue;
            }
            if held != TILE || units != TILE {
                Shapes::of(held, units).set();
                is_whole = false;
            } else if !is_whole {
                WHOLE.set();
                is_whole = true;
            }
            let (a, b, c) = (a.from(row, step), b.from(step, 0), c.from(row, 0));
            // SAFETY: the caller's promise; the shapes of tiles are as `held` and `units` say.
            unsafe { panels(count.div_ceil(TILE), columns / TILE, steps, a, b, c, add || step > 0) };
        }
    }
    if !is_whole {
        WHOLE.set();
    }
}

/// The same in tiles of the shapes that are set: `rows`, `columns` and `steps` of them.
///
/// # Safety
/// As [`product`].
unsafe fn panels<U>(
    rows: usize,
    columns: usize,
    steps: usize,
    a: Matrix<*const U>,
    b: Matrix<*const U>,
    c: Matrix<*mut f32>,
    add: bool,
) {
    // Columns outside: what is read of `B` stays in the first-level cache for all rows.
    for column in (0..columns).step_by(HELD_COLUMNS) {
        for row in (0..rows).step_by(HELD_ROWS) {
            let (row_at, column_at) = (row * TILE, column * TILE);
            let (a, b, c) = (a.from(row_at, 0), b.from(0, column_at), c.from(row_at, column_at));
            // SAFETY: the caller's promise.
            unsafe {
                match ((rows - row).min(HELD_ROWS), (columns - column).min(HELD_COLUMNS)) {
                    (1, 1) => held::<U, 1, 1>(steps, a, b, c, add),
                    (1, _) => held::<U, 1, 2>(steps, a, b, c, add),
                    (2, 1) => held::<U, 2, 1>(steps, a, b, c, add),
                    (2, _) => held::<U, 2, 2>(steps, a, b, c, add),
                    (_, 1) => held::<U, 3, 1>(steps, a, b, c, add),
                    (_, _) => held::<U, 3, 2>(steps, a, b, c, add),
                }
            }
        }
    }
}

/// `ROWS x COLUMNS` tiles of `C`, held through `steps` tiles of the inner extent.
///
/// # Safety
/// As [`product`].
#[inline(never)]
unsafe fn held<U, const ROWS: usize, const COLUMNS: usize>(
    steps: usize,
    a: Matrix<*const U>,
    b: Matrix<*const U>,
    c: Matrix<*mut f32>,
    add: bool,
) {
    // SAFETY: the caller's promise: every tile that is loaded or stored lies in its matrix.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jz 3f",
            "tileloadd tmm0, [{c0} + {c_row}]",
            ".if {columns} > 1", "tileloadd tmm1, [{c0} + {c_row} + 64]", ".endif",
            ".if {rows} > 1", "tileloadd tmm2, [{c1} + {c_row}]", ".endif",
            ".if {rows} > 1 && {columns} > 1", "tileloadd tmm3, [{c1} + {c_row} + 64]", ".endif",
            ".if {rows} > 2", "tileloadd tmm4, [{c2} + {c_row}]", ".endif",
            ".if {rows} > 2 && {columns} > 1", "tileloadd tmm5, [{c2} + {c_row} + 64]", ".endif",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            ".if {columns} > 1", "tilezero tmm1", ".endif",
            ".if {rows} > 1", "tilezero tmm2", ".endif",
            ".if {rows} > 1 && {columns} > 1", "tilezero tmm3", ".endif",
            ".if {rows} > 2", "tilezero tmm4", ".endif",
            ".if {rows} > 2 && {columns} > 1", "tilezero tmm5", ".endif",
            "2:",
            "tileloadd tmm7, [{b} + {b_row}]",
            "tileloadd tmm6, [{a0} + {a_row}]",
            "tdpbf16ps tmm0, tmm6, tmm7",
            ".if {rows} > 1", "tileloadd tmm6, [{a1} + {a_row}]", "tdpbf16ps tmm2, tmm6, tmm7", ".endif",
            ".if {rows} > 2", "tileloadd tmm6, [{a2} + {a_row}]", "tdpbf16ps tmm4, tmm6, tmm7", ".endif",
            ".if {columns} > 1",
            "tileloadd tmm7, [{b} + {b_row} + 64]",
            ".if {rows} > 2", "tdpbf16ps tmm5, tmm6, tmm7", "tileloadd tmm6, [{a1} + {a_row}]", ".endif",
            ".if {rows} > 1", "tdpbf16ps tmm3, tmm6, tmm7", "tileloadd tmm6, [{a0} + {a_row}]", ".endif",
            "tdpbf16ps tmm1, tmm6, tmm7",
            ".endif",
            "add {a0}, 64", "add {a1}, 64", "add {a2}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c0} + {c_row}], tmm0",
            ".if {columns} > 1", "tilestored [{c0} + {c_row} + 64], tmm1", ".endif",
            ".if {rows} > 1", "tilestored [{c1} + {c_row}], tmm2", ".endif",
            ".if {rows} > 1 && {columns} > 1", "tilestored [{c1} + {c_row} + 64], tmm3", ".endif",
            ".if {rows} > 2", "tilestored [{c2} + {c_row}], tmm4", ".endif",
            ".if {rows} > 2 && {columns} > 1", "tilestored [{c2} + {c_row} + 64], tmm5", ".endif",
            rows = const ROWS,
            columns = const COLUMNS,
            add = in(reg) usize::from(add),
            c0 = in(reg) c.at,
            c1 = in(reg) c.from(TILE, 0).at,
            c2 = in(reg) c.from(2 * TILE, 0).at,
            c_row = in(reg) c.row_bytes,
            a0 = inout(reg) a.at => _,
            a1 = inout(reg) a.from(TILE, 0).at => _,
            a2 = inout(reg) a.from(2 * TILE, 0).at => _,
            a_row = in(reg) a.row_bytes,
            b = inout(reg) b.at => _,
            b_row = in(reg) b.row_bytes,
            b_step = in(reg) TILE * b.row_bytes,
            steps = inout(reg) steps => _,
            options(nostack),
        );
    }
}

/// Where squares of `size` begin in `rows` x `columns`.
#[inline(always)]
fn squares(rows: usize, columns: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(size).flat_map(move |row| (0..columns).step_by(size).map(move |column| (row, column)))
}

/// A product whose left operand lies across its rows, neighbours in a column, `step_stride` from one column to the next: panels
/// of it are turned into rows, as tiles are read.
///
/// # Safety
/// As [`product`], but for the order in which the units of `a` lie; vectors of `S` are of [`TILE`] lanes.
#[inline(always)]
pub unsafe fn product_across<S: Simd, U: Zeroable + Copy>(
    simd: S,
    extents: Extents,
    (a, step_stride): (*const U, usize),
    b: Matrix<*const U>,
    c: Matrix<*mut f32>,
    add: bool,
) {
    /// A panel, small enough to stay in the first-level cache.
    const ROWS: usize = 3 * TILE;
    const STEPS: usize = 4 * TILE;
    let mut panel = [U::zeroed(); ROWS * STEPS];
    for step in (0..extents.steps).step_by(STEPS) {
        for row in (0..extents.rows).step_by(ROWS) {
            let (steps, rows) = (STEPS.min(extents.steps - step), ROWS.min(extents.rows - row));
            for (down, along) in squares(rows, steps, TILE) {
                // SAFETY: the caller's promise: these rows and steps are there; a square lies inside the panel.
                unsafe {
                    let from = a.add((step + along) * step_stride + row + down);
                    let to = panel.as_mut_ptr().add(down * STEPS + along);
                    if down + TILE <= rows && along + TILE <= steps {
                        simd.transpose(from.cast(), 4 * step_stride, to.cast(), STEPS);
                        continue;
                    }
                    for (down, along) in squares(TILE.min(rows - down), TILE.min(steps - along), 1) {
                        *to.add(down * STEPS + along) = *from.add(along * step_stride + down);
                    }
                }
            }
            let of_panel = Matrix { at: panel.as_ptr(), row_bytes: 4 * STEPS };
            // SAFETY: the caller's promise.
            unsafe {
                product(Extents { rows, steps, ..extents }, of_panel, b.from(step, 0), c.from(row, 0), add || step > 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is multiplied in tiles is tested with every other path, where `product` is.
    #[test]
    fn tiles_of_a_thread_are_given_back_as_they_were() {
        if !is_here() {
            return;
        }
        // SAFETY: the unit is there.
        let begin = || unsafe { Configured::begin() };
        let outer = begin();
        drop(begin());
        assert_eq!(Shapes::current().palette, 1, "what runs inside leaves the tiles configured");
        drop(outer);
        assert_eq!(Shapes::current().palette, 0, "a thread's tiles are given back");
    }
}
