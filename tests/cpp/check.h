// Shared by the C++ tests: a check that works in every build type, and a random number generator whose seed is printed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>

namespace check {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::fflush(stdout);
    std::cerr << file << ":" << line << ": " << what << std::endl;
    // Not abort(): no core files, and sanitizers report first.
    std::exit(1);
}

template <typename T>
std::string text(const T& value) {
    std::ostringstream out;
    out.precision(17);
    if constexpr (std::is_enum_v<T>) {
        out << +static_cast<std::underlying_type_t<T>>(value);
    } else if constexpr (std::is_integral_v<T>) {
        out << +value;  // a byte is a number
    } else {
        out << value;
    }
    return out.str();
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* a_text, const char* b_text, const char* file, int line) {
    if (!(a == b)) {
        fail(file, line, std::string(a_text) + " == " + b_text + ": " + text(a) + " is not " + text(b));
    }
}

// The seed is PPLX_SEED where that is set, so that a failure can be run again.
inline std::uint64_t seed(std::uint64_t otherwise = 1) {
    const char* given = std::getenv("PPLX_SEED");
    const std::uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 0) : otherwise;
    std::printf("seed %llu (again with PPLX_SEED=%llu)\n", static_cast<unsigned long long>(value),
                static_cast<unsigned long long>(value));
    std::fflush(stdout);
    return value;
}

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    // An integer from [low, high], the same on every platform (the standard's distributions are not).
    std::int64_t integer(std::int64_t low, std::int64_t high) {
        const auto span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
        const std::uint64_t step = span == 0 ? engine_() : engine_() % span;
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + step);
    }

    // A float from [low, high).
    float real(float low, float high) {
        return low + (high - low) * (static_cast<float>(engine_() >> 40) * 0x1p-24f);
    }

    bool chance(double probability) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < probability; }

    std::uint64_t bits() { return engine_(); }

private:
    std::mt19937_64 engine_;
};

}  // namespace check

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
    } while (false)

// Prints both values.
#define CHECK_EQ(a, b) check::equal((a), (b), #a, #b, __FILE__, __LINE__)
