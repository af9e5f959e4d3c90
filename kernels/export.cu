// Attention statistics without a score matrix: for each key the softmax probabilities that some queries give it,
// recomputed tile by tile from the saved log-sum-exp and reduced to one number (kernels/src/attention/export.rs).
//
// A block owns 64 keys of a list and walks over the queries that see them, head by head of the group, so that no two
// blocks write the same number and every sum has one order. Its warps take some queries in turn through a cp.async ring
// of their own.
//
// Versions
//   1  mma.sync for the products, the keys of a block stay in shared memory, queries in two stages. Right on an
//      H100; not timed there.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=1..256 -DQUERIES=0..2 (lists.cuh) and the formats of formats.cuh.
// ROWS is 32 up to D 128, else 16.
//   export_columns  grid (ceil(width / 64), lists), 128 threads, shared memory: 64 rows of K, for each of 4 warps two
//                   times ROWS rows of Q, and 4 times 64 floats
#include "strip.cuh"
#include "lists.cuh"

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 64, ROWS = WIDTH <= 128 ? 32 : 16, STAGES = 2;
constexpr int TILE_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = ROWS * ROW_BYTES;

} // namespace

KERNEL(128) export_columns(ARGUMENT Lists l, ARGUMENT Observers o) {
    DYNAMIC_SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int list = blockIdx.y, key0 = blockIdx.x * KEYS, len = l.pages.lens[list];
    float *const columns = o.columns + (long long)list * o.width + key0;
    if (key0 >= len) {
        if (thread < KEYS && key0 + thread < o.width) columns[thread] = 0.0f;
        return;
    }
    const u32 tile = shared_address(memory), ring = tile + TILE_BYTES + warp * (STAGES * STAGE_BYTES);
    float *const joined = reinterpret_cast<float *>(memory + TILE_BYTES + WARPS * STAGES * STAGE_BYTES);
    if constexpr (KeyFormat::CODED) {
        const Share<KEYS, THREADS> share(tile, thread);
        share.template widen<KeyFormat, false>(len - key0, [&](int i) { return key_of_slot(l, list, key0 + share.row + i * share.STEP); });
    } else {
        copy_rows<KEYS, THREADS>(tile, thread, len - key0, o.q, [&](int row) { return key_of_slot(l, list, key0 + row); });
    }
    copy_async_commit();
    copy_async_wait<0>();
    block_sync();

    const Problem p = problem_of(o);
    const Logits logits(p);
    const Sight sight = sight_of(l.pages, p, list, len);
    const Span rows = observers_of(o, sight, key0, least(KEYS, len - key0));
    const int steps = rows.first < rows.end ? (rows.end - rows.first + WARPS * ROWS - 1) / (WARPS * ROWS) : 0;
    const int group = o.q_heads / l.heads;
    const long long head0 = (long long)(list / l.heads) * o.q_heads + list % l.heads * group;
    float total = 0.0f; // of key `thread`
    for (int member = 0; member < group; member++) {
        const long long row_of_head = (head0 + member) * o.length + o.q_first;
        const float *const lse = o.lse + (head0 + member) * o.q_len;
        auto row0_of = [&](int step) { return rows.first + (step * WARPS + warp) * ROWS; };
        auto copy = [&](int step) {
            const int row0 = row0_of(step);
            copy_rows<ROWS, 32>(ring + step % STAGES * STAGE_BYTES, lane, rows.end - row0, o.q,
                                [&](int row) { return row_at(o.q, row_of_head + row0 + row); });
        };
        float part[KEYS / 8][2];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) part[n][0] = part[n][1] = 0.0f;
        if (steps) copy(0);
        copy_async_commit();
        for (int step = 0; step < steps; step++) {
            copy_async_wait<0>();
            warp_sync(); // this step's rows are there for all lanes, and all are done with the other stage
            if (step + 1 < steps) copy(step + 1);
            copy_async_commit();
            const int row0 = row0_of(step);
            if (row0 >= rows.end) continue;
            const u32 stage = ring + step % STAGES * STAGE_BYTES;
            using Part = Strip<ROWS, KEYS>;
            Part strip;
            strip.scores<4>(tile, Queries<ROWS, false>(stage, 0, logits)); // all at once spills on sm_100 at D 128
            strip.cap(logits);
            Span seen[Part::SLOTS];
            float shift[Part::SLOTS];
#pragma unroll
            for (int slot = 0; slot < Part::SLOTS; slot++) {
                const int row = row0 + Part::row(slot);
                const float of_row = row < rows.end ? lse[row] : minus_infinity();
                seen[slot] = row < rows.end ? sight.of(p, row) : Span{0, 0};
                // A row that sees nothing has only hidden keys, whose exponentials are 0 under any finite shift.
                shift[slot] = of_row == minus_infinity() ? 0.0f : of_row * LOG2_E;
            }
            const bool whole = row0 + ROWS <= rows.end && key0 >= sight.of(p, row0 + ROWS - 1).first &&
                               key0 + KEYS <= sight.of(p, row0).end;
            if (!whole) strip.mask(seen, key0);
#pragma unroll
            for (int m = 0; m < Part::TILES; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float x = strip.s[m][n][i];
                        const int slot = 2 * m + i / 2;
                        const float probability = exp2_fast(fused(x, logits.rest(), -shift[slot]));
                        const bool hidden = QUERIES == COUNT_BELOW_EVEN && x == minus_infinity();
                        if (!hidden) take_in<QUERIES>(part[n][i % 2], probability, even_share(seen[slot], shift[slot]));
                    }
        }
        // The eight rows of lanes of each column, then the warps.
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2)
                    part[n][i] = join_parts<QUERIES>(part[n][i], shuffle_xor(part[n][i], mask));
                if (lane < 4) joined[warp * KEYS + 8 * n + 2 * lane + i] = part[n][i];
            }
        block_sync();
        if (thread < KEYS) {
            float of_head = joined[thread];
            for (int other = 1; other < WARPS; other++) of_head = join_parts<QUERIES>(of_head, joined[other * KEYS + thread]);
            total = join_heads(o, total, of_head);
        }
        block_sync(); // `joined` may be written again
    }
    if (thread < KEYS && key0 + thread < o.width) columns[thread] = o.group == 0 ? total / float(group) : total;
}
