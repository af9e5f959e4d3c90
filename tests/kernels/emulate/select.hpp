// kernels/select.cu
#include "select.cu"

namespace {

// Rust's total_cmp.
bool before(float a, float b) {
    auto order = [](float x) {
        int32_t bits;
        memcpy(&bits, &x, 4);
        return bits ^ int32_t(uint32_t(bits >> 31) >> 1);
    };
    return order(a) < order(b);
}

int failures(Cache &cache) {
    int failed = 0;
    const int count = cache.count(), width = cache.longest() + 3;
    for (int kind = 0; kind < 4; kind++) {
        std::vector<float> scores(size_t(count) * width, NAN), lost(count), tops(count);
        std::vector<u32> slots(scores.size(), 1u << 30);
        std::vector<int> counts(count), wrong_slots(count), gone(count);
        for (int list = 0; list < count; list++) {
            for (int slot = 0; slot < cache.lens[list]; slot++) {
                // Few values, so that many tie; values that differ in the last bit; all equal; and everything there is.
                const float odd[] = {0.0f, -0.0f, 1e-40f, -3.0f, INFINITY, -INFINITY, NAN, -NAN};
                const float x = kind == 0 ? float(int(cache.random() % 7) - 3) : kind == 1 ? cache.normal() : 1.0f;
                scores[list * width + slot] = kind == 3 ? odd[cache.random() % 8] : x;
            }
            counts[list] = cache.random() % (cache.lens[list] + 2);
        }
        Choice c{scores.data(), counts.data(), slots.data(), lost.data(), tops.data(), wrong_slots.data(), gone.data(), width, 0, 0, count};
        machine::launch({unsigned(count), 1, 1}, 1024, 0, [&] { select_best(cache.lists, c); });
        machine::launch({unsigned(count), 1, 1}, 1024, 0, [&] { score_bounds(cache.lists, c); });
        for (int list = 0; list < count; list++) {
            const float *of_list = &scores[list * width];
            std::vector<u32> order;
            for (int slot = 0; slot < cache.lens[list]; slot++) order.push_back(slot);
            std::sort(order.begin(), order.end(), [&](u32 a, u32 b) {
                return before(of_list[b], of_list[a]) || (!before(of_list[a], of_list[b]) && a > b);
            });
            const int stay = std::min(counts[list], cache.lens[list]);
            const float best_lost = stay < cache.lens[list] ? of_list[order[stay]] : -INFINITY;
            if (memcmp(&best_lost, &lost[list], 4)) failed += wrong("best lost", list, stay, lost[list], best_lost);
            order.resize(stay);
            std::sort(order.begin(), order.end());
            for (int i = 0; i < stay; i++)
                if (slots[list * width + i] != order[i]) failed += wrong("slot", list, i, slots[list * width + i], order[i]);
            if (slots[list * width + stay] != 1u << 30) failed += wrong("slot behind the last", list, stay, slots[list * width + stay], 0);
            float top = -INFINITY;
            int bad = -1;
            for (int slot = cache.lens[list]; slot--;) {
                top = fmaxf(top, of_list[slot]);
                if (!std::isfinite(of_list[slot])) bad = slot;
            }
            failed += differs("first that is no number", list, 0, wrong_slots[list], bad, 0);
            if (bad < 0) failed += differs("top", list, 0, tops[list], top, 0);
        }
        // Of each list the slot before the latest four: lost where a tie or anything better was lost before.
        c.recent = 4;
        for (int list = 0; list < count; list++) {
            const int leaving = cache.lens[list] - 5;
            const float score = leaving < 0 ? 0.0f : scores[list * width + leaving];
            lost[list] = list % 3 == 0 ? score : list % 3 == 1 ? score + 1 : score - 1;
        }
        std::fill(slots.begin(), slots.end(), 1u << 30);
        machine::launch({blocks(width, 256), unsigned(count), 1}, 256, 0, [&] { let_leave(cache.lists, c); });
        for (int list = 0; list < count; list++) {
            const int leaving = cache.lens[list] - 5;
            const bool goes = leaving >= 0 && !(scores[list * width + leaving] > lost[list]);
            if (gone[list] != (goes ? leaving : -1)) failed += wrong("slot that goes", list, 0, gone[list], leaving);
            int stays = 0;
            for (int slot = 0; slot < cache.lens[list]; slot++) {
                if (goes && slot == leaving) continue;
                if (slots[list * width + stays] != u32(slot)) failed += wrong("slot that stays", list, stays, slots[list * width + stays], slot);
                stays++;
            }
            if (slots[list * width + stays] != 1u << 30) failed += wrong("slot behind those that stay", list, stays, slots[list * width + stays], 0);
        }
        c.sink = 5, c.recent = 4;
        for (int list = 0; list < count; list++) tops[list] = list == count / 2 ? (kind == 2 ? 3e7f : 9.0f) : -5.0f;
        const float recent = kind == 2 ? 30000002.0f : 10.0f, sink = kind == 2 ? 30000004.0f : 11.0f; // numbers are two apart there
        const std::vector<float> scores_before = scores;
        machine::launch({blocks(width, 256), unsigned(count), 1}, 256, 0, [&] { score_protect(cache.lists, c); });
        for (int list = 0; list < count; list++)
            for (int slot = 0; slot < width; slot++) {
                const size_t at = size_t(list) * width + slot;
                float wanted = scores_before[at];
                if (slot < cache.lens[list] && wanted == 0) wanted = 0; // -0 equals it
                if (slot < cache.lens[list] && slot >= cache.lens[list] - 4) wanted = recent;
                if (slot < cache.lens[list] && cache.origins[list * cache.stride + slot] < 5) wanted = sink;
                if (!std::isfinite(scores_before[at])) wanted = scores_before[at];
                if (memcmp(&wanted, &scores[at], 4)) failed += wrong("protected", list, slot, scores[at], wanted);
            }
    }
    return failed;
}

} // namespace
