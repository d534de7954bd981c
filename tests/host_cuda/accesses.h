// Which work comes after which, and whether two pieces of it use the same memory at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <vector>

namespace host_cuda {

// How many pieces of work of each engine are known to be done before something else begins.
typedef std::map<int, long> Clock;

inline void learn(Clock& its, const Clock& more) {
    for (auto& [engine, number] : more) its[engine] = std::max(its[engine], number);
}

inline bool knows(const Clock& its, int engine, long number) {
    auto found = its.find(engine);
    return found != its.end() && found->second >= number;
}

struct Access {
    size_t low, high;
    bool is_write;
    int engine;  // and the number of its piece of work
    long number;
};

constexpr size_t MANY = 64;

// Adds an access of work that comes after what `before` knows. Returns whether it comes at the time of one that is there.
inline bool add(std::vector<Access>& accesses, const Access& its, const Clock& before, const Clock& known_to_all) {
    bool is_race = false;
    const bool are_many = accesses.size() > MANY;
    auto is_over = [&](const Access& other) {
        const bool is_before = knows(before, other.engine, other.number);
        is_race |= !is_before && other.low < its.high && its.low < other.high && (its.is_write || other.is_write);
        if (are_many && knows(known_to_all, other.engine, other.number)) return true;
        return is_before && its.low <= other.low && other.high <= its.high && its.is_write >= other.is_write;
    };
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_over), accesses.end());
    accesses.push_back(its);
    return is_race;
}

}  // namespace host_cuda
