#include "kernel_table.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace aegis {

const KernelTable& table_scalar();
const KernelTable& table_avx2();
const KernelTable& table_avx512();
const KernelTable& table_neon();

namespace {

#if defined(AEGIS_HAVE_AVX512)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first; the scalar table is for tests and for processors below the floor.
const KernelTable* available(int n) {
    const KernelTable* tables[4];
    int count = 0;
#if defined(AEGIS_HAVE_AVX512)
    if (has_avx512()) tables[count++] = &table_avx512();
    if (has_avx2()) tables[count++] = &table_avx2();
#endif
#if defined(AEGIS_HAVE_NEON)
    tables[count++] = &table_neon();
#endif
    tables[count++] = &table_scalar();
    return n >= 0 && n < count ? tables[n] : nullptr;
}

const KernelTable* find(const char* name) {
    for (int n = 0; available(n); ++n)
        if (std::strcmp(available(n)->name, name) == 0) return available(n);
    return nullptr;
}

const KernelTable* first_choice() {
    const char* wanted = std::getenv("AEGIS_ISA");
    const KernelTable* table = wanted ? find(wanted) : nullptr;
    return table ? table : available(0);
}

std::atomic<const KernelTable*>& active() {
    static std::atomic<const KernelTable*> table{first_choice()};
    return table;
}

// Seconds of multiply-adds with `factor`.
double time_multiply_add(const KernelTable& table, float factor) {
    double best = 1.0;
    for (int attempt = 0; attempt < 4; ++attempt) {
        float sink[18] = {};
        sink[16] = factor;
        sink[17] = 1.0f;
        const auto start = std::chrono::steady_clock::now();
        table.fma_probe(200, sink);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// Where a denormal factor is a trap to microcode it costs a hundred cycles; elsewhere nothing.
bool denormals_are_fast() {
    static const bool fast = [] {
        const KernelTable& table = *available(0);
        return time_multiply_add(table, 0x1p-140f) < 2 * time_multiply_add(table, 0.5f);
    }();
    return fast;
}

}  // namespace

bool scale_inputs(const LinearDesc& w, const float* x, int64_t n, float* out) {
    const KernelTable& table = kernels();
    if (w.group_size < kGroup) return false;  // such codes are multiplied by their scales first
    return table.scale_inputs && denormals_are_fast() && table.scale_inputs(w.kind, x, n, out);
}

const KernelTable& kernels() { return *active().load(std::memory_order_relaxed); }

bool select_isa(const char* name) {
    const KernelTable* table = find(name);
    if (table) active().store(table);
    return table != nullptr;
}

const char* available_isa(int n) {
    const KernelTable* table = available(n);
    return table ? table->name : nullptr;
}

}  // namespace aegis
