// The matrix unit of Intel's CPUs (AMX): eight tiles of up to 16 rows of 64 bytes each, and the product of two of them.
// Every thread has its own tiles and its own configuration of their shapes.
//
// Two forms of the same few operations: the instructions (builds with -mamx-bf16), and plain C++ that follows their
// description in Intel's manual, Software Developer's Manual volume 2, for tests on CPUs without them.
#pragma once

#if defined(__AMX_BF16__) || defined(RADIXRT_EMULATE_AMX)
#define RADIXRT_HAS_TILES 1

#include <cerrno>
#include <cstdint>
#if !defined(RADIXRT_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace radixrt::amx {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// What LDTILECFG reads. A tile that is not used has no rows and no bytes.
struct Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

#if !defined(RADIXRT_EMULATE_AMX)

// Tiles are off in a process until it asks for them, once for all its threads, those of later included. Gives 0 or an
// errno. Source: Linux, Documentation/arch/x86/xstate.rst.
inline int request_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? errno : 0;
}

// Some virtual machines say that there are tiles and then have none, or other ones. Source: CPUID leaves 1DH, 1EH.
inline bool has_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) || a < 1) return false;
    __cpuid_count(0x1d, 1, a, b, c, d);
    bool has_shape = (b & 0xffff) >= kTileRowBytes && b >> 16 >= kTiles && (c & 0xffff) >= kTileRows;
    if (!__get_cpuid_count(0x1e, 0, &a, &b, &c, &d)) return false;
    return has_shape && (b & 0xff) >= kTileRows && (b >> 8 & 0xffff) >= kTileRowBytes;
}

// Not the compiler's intrinsics: those of GCC 12 say neither that a tile load reads memory nor that LDTILECFG reads
// more than 8 bytes, so that stores before them may be left out or come too late.
inline void configure(const Config& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

inline void release() { asm volatile("tilerelease"); }

template <int kTile>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline void load(const void* rows, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kTile>
inline void store(void* rows, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}

// sums += left times right, of bfloat16 pairs: a row of left against the rows of right.
template <int kSums, int kLeft, int kRight>
inline void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

#else

namespace emulated {

struct Unit {
    Config config;
    bool is_configured = false;
    uint8_t data[kTiles][kTileRows][kTileRowBytes];
};

inline thread_local Unit unit;

// Ends the program where the instruction would fault.
inline void require(bool holds, const char* rule) {
    if (holds) return;
    std::fprintf(stderr, "emulated AMX: %s\n", rule);
    std::abort();
}

inline void require_tile(int tile) {
    require(unit.is_configured, "#UD: tiles are not configured");
    require(tile >= 0 && tile < kTiles && unit.config.rows[tile] > 0, "#UD: the tile has no shape");
}

inline int num_rows(int tile) { return unit.config.rows[tile]; }
inline int row_bytes(int tile) { return unit.config.row_bytes[tile]; }

inline void configure(const Config& config) {
    require(config.palette == 1, "#GP: palette must be 1");
    require(config.start_row == 0, "start_row must be 0");
    for (uint8_t byte : config.reserved) require(byte == 0, "#GP: reserved bytes must be 0");
    for (int i = 0; i < 16; ++i) {
        int rows = config.rows[i], bytes = config.row_bytes[i];
        require(i < kTiles || (!rows && !bytes), "#GP: shapes of tiles past the eighth must be 0");
        require(rows <= kTileRows && bytes <= kTileRowBytes, "#GP: a tile has at most 16 rows of 64 bytes");
        require(!rows == !bytes, "#GP: rows and bytes must both be 0 or neither");
    }
    unit.config = config;
    unit.is_configured = true;
    std::memset(unit.data, 0, sizeof unit.data);
}

inline void release() {
    unit.config = Config{};
    unit.is_configured = false;
    std::memset(unit.data, 0, sizeof unit.data);
}

inline void zero(int tile) {
    require_tile(tile);
    std::memset(unit.data[tile], 0, sizeof unit.data[tile]);
}

inline void load(int tile, const void* rows, int64_t stride_bytes) {
    zero(tile);
    for (int i = 0; i < num_rows(tile); ++i)
        std::memcpy(unit.data[tile][i], static_cast<const char*>(rows) + i * stride_bytes, row_bytes(tile));
}

inline void store(int tile, void* rows, int64_t stride_bytes) {
    require_tile(tile);
    for (int i = 0; i < num_rows(tile); ++i)
        std::memcpy(static_cast<char*>(rows) + i * stride_bytes, unit.data[tile][i], row_bytes(tile));
}

// Denormals count as zero, as inputs and as results; the control register has no say.
inline float without_denormals(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = bits & 0x7f800000 ? bits : bits & 0x80000000;
    std::memcpy(&x, &bits, 4);
    return x;
}

// A tile's bfloat16 as floats; past its shape there are zeros.
inline void widen(int tile, float (&rows)[kTileRows][kTileRowBytes / 2]) {
    for (int i = 0; i < kTileRows; ++i)
        for (int j = 0; j < kTileRowBytes / 2; ++j) {
            uint32_t bits = (uint32_t)unit.data[tile][i][2 * j] << 16 | (uint32_t)unit.data[tile][i][2 * j + 1] << 24;
            std::memcpy(&rows[i][j], &bits, 4);
            rows[i][j] = without_denormals(rows[i][j]);
        }
}

// The even elements of a row are summed from zero, and so are the odd ones, each product added with one rounding; then
// both sums are added, and that to what was there.
inline void multiply_add(int sums, int left, int right) {
    require_tile(sums), require_tile(left), require_tile(right);
    require(sums != left && sums != right && left != right, "#UD: the three tiles must differ");
    require(row_bytes(sums) % 4 == 0 && row_bytes(left) % 4 == 0 && row_bytes(right) % 4 == 0,
            "#UD: rows must be whole 32-bit words");
    require(row_bytes(left) / 4 == num_rows(right), "#UD: left's words must be as many as right's rows");
    require(num_rows(sums) == num_rows(left), "#UD: sums and left must have as many rows");
    require(row_bytes(sums) == row_bytes(right), "#UD: sums and right must have rows of one size");
    float x[kTileRows][kTileRowBytes / 2], y[kTileRows][kTileRowBytes / 2];
    widen(left, x), widen(right, y);
    for (int m = 0; m < num_rows(sums); ++m) {
        float parts[kTileRowBytes / 2] = {};  // even and odd sums of each output
        for (int k = 0; k < num_rows(right); ++k)
            for (int i = 0; i < kTileRowBytes / 2; ++i)
                parts[i] = without_denormals(std::fma(x[m][2 * k + i % 2], y[k][i], parts[i]));
        for (int n = 0; n < row_bytes(sums) / 4; ++n) {
            float result;
            std::memcpy(&result, unit.data[sums][m] + 4 * n, 4);
            result = without_denormals(result);
#if defined(RADIXRT_WRONG_AMX)
            // Broken units, to show that each is found out: one loses odd elements, one sums rows in different orders.
            if (RADIXRT_WRONG_AMX == 1) parts[2 * n + 1] = 0;
            if (RADIXRT_WRONG_AMX == 2 && m > 0) result += parts[2 * n], parts[2 * n] = 0;
#endif
            result = without_denormals(result + without_denormals(parts[2 * n] + parts[2 * n + 1]));
            std::memcpy(unit.data[sums][m] + 4 * n, &result, 4);
        }
    }
}

}  // namespace emulated

inline int request_permission() { return 0; }
inline bool has_tiles() { return true; }
inline void configure(const Config& config) { emulated::configure(config); }
inline void release() { emulated::release(); }

template <int kTile>
inline void zero() {
    emulated::zero(kTile);
}

template <int kTile>
inline void load(const void* rows, int64_t stride_bytes) {
    emulated::load(kTile, rows, stride_bytes);
}

template <int kTile>
inline void store(void* rows, int64_t stride_bytes) {
    emulated::store(kTile, rows, stride_bytes);
}

template <int kSums, int kLeft, int kRight>
inline void multiply_add() {
    emulated::multiply_add(kSums, kLeft, kRight);
}

#endif

}  // namespace radixrt::amx

#endif
