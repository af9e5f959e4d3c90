// kernels/compact.cu
#include "compact.cu"

namespace {

using Numbers = std::vector<std::vector<int>>; // of each list

// Whether every list holds the rows and positions that it should.
int compare(const char *what, Cache &cache, const Numbers &positions, const Numbers &origins) {
    int failed = 0;
    for (int list = 0; list < cache.count(); list++)
        for (int slot = 0; slot < cache.lens[list]; slot++) {
            for (int part : {0, 1})
                if (memcmp(cache.row(list, slot, part), cache.wanted(list, slot, part), cache.BYTES[part]))
                    failed += wrong(what, list, slot, plainly::decode(KeyFormat{}, cache.row(list, slot, 0), 0), cache.key(list, slot, 0));
            failed += differs(what, list, slot, cache.positions[list * cache.stride + slot], positions[list][slot], 0);
            failed += differs(what, list, slot, cache.origins[list * cache.stride + slot], origins[list][slot], 0);
        }
    return failed;
}

int failures(Cache &cache) {
    int failed = 0;
    const int count = cache.count(), width = cache.longest() + 2;
    // Random slots stay: some lists whole, some only their end.
    std::vector<u32> slots(size_t(count) * width);
    std::vector<int> counts(count);
    Numbers positions(count), origins(count);
    std::vector<std::vector<float>> attention(count);
    for (int list = 0; list < count; list++) {
        std::vector<unsigned char> rows[2];
        const unsigned odds = list % 3 == 0 ? 2 : list % 3 == 1 ? 1 : 5;
        for (int slot = 0; slot < cache.lens[list]; slot++) {
            if (cache.random() % odds && slot + 4 < cache.lens[list]) continue;
            slots[list * width + counts[list]++] = slot;
            for (int part : {0, 1})
                rows[part].insert(rows[part].end(), cache.wanted(list, slot, part), cache.wanted(list, slot, part) + cache.BYTES[part]);
            positions[list].push_back(cache.positions[list * cache.stride + slot]);
            origins[list].push_back(cache.origins[list * cache.stride + slot]);
            attention[list].push_back(cache.attention[list * cache.stride + slot]);
        }
        cache.rows[0][list] = rows[0], cache.rows[1][list] = rows[1];
    }
    Keeping keeping{slots.data(), counts.data(), width, 0};
    machine::launch({unsigned(count), 5, 1}, 256, 0, [&] { keep_slots(cache.lists, keeping); });
    cache.lens = counts, cache.tie();
    failed += compare("kept", cache, positions, origins);

    // Every list gets three tokens more, or as many as there is room for.
    const int room = cache.stride - *std::max_element(counts.begin(), counts.end()), more = std::min(3, room), length = 5;
    std::vector<Element> k(size_t(count) * length * HEAD_DIM), v(k.size());
    for (size_t i = 0; i < k.size(); i++) k[i] = narrow(cache.normal()), v[i] = narrow(cache.normal());
    Arrival arrival{k.data(), v.data(), length, 1, more, 77};
    for (int &len : cache.lens) len += more;
    if (more) machine::launch({blocks(more, 32), unsigned(count), 1}, 128, 0, [&] { append_tokens(cache.lists, arrival); });
    for (int list = 0; list < count; list++)
        for (int token = 1; token <= more; token++) {
            float key[HEAD_DIM], value[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d++) {
                const size_t at = (size_t(list) * length + token) * HEAD_DIM + d;
                key[d] = widen(k[at]), value[d] = widen(v[at]);
            }
            cache.push(list, key, value);
            positions[list].push_back(76 + token), origins[list].push_back(76 + token), attention[list].push_back(0);
        }
    failed += compare("appended", cache, positions, origins);

    // Attention is added.
    const int longest = cache.longest();
    std::vector<float> columns(size_t(count) * longest, 0.5f);
    machine::launch({blocks(longest, 256), unsigned(count), 1}, 256, 0, [&] { add_columns(cache.lists, {columns.data(), longest, 0}); });
    for (int list = 0; list < count; list++)
        for (int slot = 0; slot < cache.lens[list]; slot++)
            failed += differs("attention", list, slot, cache.attention[list * cache.stride + slot], attention[list][slot] + 0.5, 1e-6);

    // The last tokens' gates, and then those of the tokens before them.
    const int shortest = *std::min_element(cache.lens.begin(), cache.lens.end());
    for (int later : {0, 1}) {
        const int gated = std::min(2, shortest);
        std::vector<float> gates(size_t(gated) * count);
        for (float &gate : gates) gate = cache.normal();
        if (gated) machine::launch({1, unsigned(count), 1}, 256, 0, [&] { place_gates(cache.lists, {gates.data(), gated, later}); });
        for (int list = 0; list < count; list++)
            for (int token = 0; token < gated; token++) {
                const int slot = cache.lens[list] - gated + token - later;
                if (slot < 0) continue;
                const float found = cache.attention[list * cache.stride + slot], gate = gates[size_t(token) * count + list];
                if (found != gate) failed += wrong("gates", list, slot, found, gate);
            }
    }

    // Tokens 1 to 3 of the heads behind the first one, to the same places of a shorter tensor.
    std::vector<Element> taken(size_t(count) * 4 * HEAD_DIM);
    if (count > 1) machine::launch({1, unsigned(count - 1), 1}, 128, 0, [&] { take_tokens({k.data(), taken.data(), 1, length, 1, 3, 1, 4, 1, 0}); });
    for (int head = 1; head < count; head++)
        if (memcmp(&taken[(size_t(head) * 4 + 1) * HEAD_DIM], &k[(size_t(head) * length + 1) * HEAD_DIM], 3 * HEAD_DIM * sizeof(Element)))
            failed += wrong("taken", head, 0, 0, 0);

    // The tokens that every list has, as tensors.
    const int all = *std::min_element(cache.lens.begin(), cache.lens.end());
    const size_t pitches[] = {size_t(KeyFormat::list_bytes(all)), size_t(ValueFormat::list_bytes(all))};
    std::vector<unsigned char> dense_k(count * pitches[0] + 1), dense_v(count * pitches[1] + 1);
    if (all) machine::launch({blocks(all, 32), unsigned(count), 2}, 128, 0, [&] { gather_tokens(cache.lists, {dense_k.data(), dense_v.data(), all, 0}); });
    for (int list = 0; all && list < count; list++) {
        if (memcmp(&dense_k[list * pitches[0]], cache.wanted(list, 0, 0), size_t(all) * cache.BYTES[0])) failed += wrong("gathered keys", list, 0, 0, 0);
        if (memcmp(&dense_v[list * pitches[1]], cache.wanted(list, 0, 1), size_t(all) * cache.BYTES[1])) failed += wrong("gathered values", list, 0, 0, 0);
    }

    // The first page of the first list moves to one that nobody has.
    const u32 from = cache.pages[0], to = cache.free.back();
    machine::launch({1, 2, 1}, 128, 0, [&] { move_pages(cache.lists, {&from, &to}); });
    std::vector<u32> wanted_pages = cache.pages;
    wanted_pages[0] = to;
    const u32 place = 0;
    machine::launch({1, 1, 1}, 256, 0, [&] { change_table(cache.lists, {&place, &to, 1, 0}); });
    if (cache.pages != wanted_pages) failed += wrong("changed table", 0, 0, cache.pages[0], to);
    failed += compare("moved", cache, positions, origins);

    if (HEAD_DIM % 2 == 0) {
        std::vector<double> turns(HEAD_DIM / 2);
        for (int i = 0; i < HEAD_DIM / 2; i++) turns[i] = std::pow(10000.0, -2.0 * i / HEAD_DIM) / 6.283185307179586;
        const double of_elements = ELEMENT == F32 ? 1e-6 : ELEMENT == BF16 ? 8e-3 : 1e-3;
        // Keys are up to about 5: a step of their codes, and a half of it again where a value was between two.
        const double of_keys = K_FORMAT == PLAIN ? of_elements : K_FORMAT == INT8 ? 0.05 : K_FORMAT == INT4 ? 0.6 : 0.13;
        // Whether `turned(channel)` is `at(channel)`, turned by so many positions.
        auto turns_to = [&](int list, int slot, auto turned, int by, auto at, double allowed) {
            for (int i = 0; i < HEAD_DIM / 2; i++) {
                const double angle = by * turns[i] * 6.283185307179586, x = at(i), y = at(i + HEAD_DIM / 2);
                failed += differs("turned", list, slot, turned(i), x * cos(angle) - y * sin(angle), allowed);
                failed += differs("turned", list, slot, turned(i + HEAD_DIM / 2), y * cos(angle) + x * sin(angle), allowed);
            }
        };
        for (int list = 0; list < count; list++)
            for (int slot = 0; slot < cache.lens[list]; slot++)
                cache.positions[list * cache.stride + slot] = slot % 5 ? slot + 123456 : slot;
        // The newest 37, or whole lists that are shorter.
        const int newest = 37;
        machine::launch({blocks(newest, 32), unsigned(count), 1}, 128, 0, [&] { rotate_keys(cache.lists, {turns.data(), newest, 0}); });
        for (int list = 0; list < count; list++)
            for (int slot = 0; slot < cache.lens[list]; slot++) {
                const int by = slot % 5 ? -123456 : 0, is_new = slot >= cache.lens[list] - newest;
                failed += differs("position", list, slot, cache.positions[list * cache.stride + slot], is_new ? slot : slot - by, 0);
                auto turned = [&](int d) { return plainly::decode(KeyFormat{}, cache.row(list, slot, 0), d); };
                turns_to(list, slot, turned, is_new ? by : 0, [&](int d) { return cache.key(list, slot, d); }, is_new ? of_keys : 0);
            }

        // Two queries of each of two heads of a list's group, behind a sequence of 70 tokens.
        const int group = 2, queries = 2, seen = 70, rows = count * group * queries;
        std::vector<Element> q(size_t(rows) * HEAD_DIM);
        for (Element &x : q) x = narrow(cache.normal());
        const std::vector<Element> before = q;
        machine::launch({1, unsigned(count * group), 1}, 128, 0, [&] { rotate_queries(cache.lists, {q.data(), turns.data(), cache.heads * group, queries, seen, 0}); });
        for (int row = 0; row < rows; row++) {
            const int list = row / queries / group;
            auto at = [&](const std::vector<Element> &of) { return [&of, row](int d) { return double(widen(of[size_t(row) * HEAD_DIM + d])); }; };
            turns_to(list, row, at(q), cache.lens[list] - seen, at(before), of_elements);
        }
    }
    return failed;
}

} // namespace
