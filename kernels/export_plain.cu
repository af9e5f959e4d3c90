// What export.cu does, on CUDA cores: for f32.
//
// Versions
//   1  Tiles of 64 queries and 64 keys in f32, 4x4 products per thread, the depth in slices of 16 through shared memory.
//      Right on an H100; not timed there.
//
// Compile with -DELEMENT=F32 -DHEAD_DIM=1..256 -DQUERIES=0..2 (lists.cuh) and the formats of formats.cuh.
//   export_columns  grid (ceil(width / 64), lists), 256 threads
#include "lists.cuh"

namespace {

constexpr int THREADS = 256, SIDE = 16, EACH = 4, TILE = SIDE * EACH, DEPTH = 16;

} // namespace

KERNEL(256) export_columns(ARGUMENT Lists l, ARGUMENT Observers o) {
    __shared__ float left[DEPTH][TILE + 1], right[DEPTH][TILE + 1], joined[SIDE][TILE + 1];
    const int thread = threadIdx.x, x = thread % SIDE, y = thread / SIDE;
    const int list = blockIdx.y, key0 = blockIdx.x * TILE, len = l.pages.lens[list], count = least(TILE, len - key0);
    float *const columns = o.columns + (long long)list * o.width + key0;
    if (count <= 0) {
        if (thread < TILE && key0 + thread < o.width) columns[thread] = 0.0f;
        return;
    }
    const Problem p = problem_of(o);
    // Keys behind the end of the list repeat its last one; nobody sees them.
    const unsigned char *of_key[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        of_key[i] = key_of_slot(l, list, least(key0 + thread / DEPTH + THREADS / DEPTH * i, len - 1));
    const Sight sight = sight_of(l.pages, p, list, len);
    const Span rows = observers_of(o, sight, key0, count);
    const int group = o.q_heads / l.heads;
    const long long head0 = (long long)(list / l.heads) * o.q_heads + list % l.heads * group;
    float total = 0.0f; // of key `thread`
    for (int member = 0; member < group; member++) {
        const long long row_of_head = (head0 + member) * o.length + o.q_first;
        const float *const lse = o.lse + (head0 + member) * o.q_len;
        float part[EACH] = {};
        for (int row0 = rows.first; row0 < rows.end; row0 += TILE) {
            float product[EACH][EACH] = {};
            for (int start = 0; start < HEAD_DIM; start += DEPTH) {
                const int d = start + forgotten(thread) % DEPTH;
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int at = thread / DEPTH + THREADS / DEPTH * i;
                    const bool real = d < HEAD_DIM && row0 + at < rows.end;
                    left[thread % DEPTH][at] =
                        real ? element<ELEMENT>(o.q, (row_of_head + row0 + at) * HEAD_DIM + d) : 0.0f;
                    right[thread % DEPTH][at] = d < HEAD_DIM ? KeyFormat::at(of_key[i], d) : 0.0f;
                }
                block_sync();
#pragma unroll
                for (int k = 0; k < DEPTH; k++)
#pragma unroll
                    for (int i = 0; i < EACH; i++)
#pragma unroll
                        for (int j = 0; j < EACH; j++)
                            product[i][j] = fused(left[k][y + SIDE * i], right[k][x + SIDE * j], product[i][j]);
                block_sync();
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int row = row0 + y + SIDE * i;
                if (row >= rows.end) continue;
                // Looked up anew: there are no registers to keep it in.
                const Span seen = sight.is_dense ? visible(p, row, len) : sight_of(l.pages, p, list, len).of(p, row);
                const float shift = lse[row] * LOG2_E;
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    const int key = key0 + x + SIDE * j;
                    if (key < seen.first || key >= seen.end) continue;
                    float logit = product[i][j] * o.scale;
                    if (o.softcap > 0.0f) logit = soft_cap(logit, o.softcap);
                    take_in<QUERIES>(part[j], exp2_fast(fused(logit, LOG2_E, -shift)), even_share(seen, shift));
                }
            }
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) joined[y][x + SIDE * j] = part[j];
        block_sync();
        if (thread < TILE) {
            float of_head = joined[0][thread];
            for (int other = 1; other < SIDE; other++) of_head = join_parts<QUERIES>(of_head, joined[other][thread]);
            total = join_heads(o, total, of_head);
        }
        block_sync(); // `joined` may be written again
    }
    if (thread < TILE && key0 + thread < o.width) columns[thread] = o.group == 0 ? total / float(group) : total;
}
