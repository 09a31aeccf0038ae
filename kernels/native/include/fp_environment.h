// The floating-point environment that the kernels are defined in: rounding to nearest, denormals
// kept, no traps. A host process or a library built with -ffast-math may have left another one.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace aegis {

// Sets it for the calling thread; what was set before comes back at the end of the scope.
class FpEnvironment {
public:
#if defined(__x86_64__)
    FpEnvironment() : before_(read()), changed_((before_ & kControl) != kDefault) {
        if (changed_) write(kDefault);
    }
    ~FpEnvironment() {
        if (changed_) write(before_);
    }

private:
    static constexpr uint32_t kControl = 0xFFC0;  // MXCSR but for the flags of what has happened
    static constexpr uint32_t kDefault = 0x1F80;

    static uint32_t read() {
        uint32_t mxcsr;
        __asm__ __volatile__("stmxcsr %0" : "=m"(mxcsr)::"memory");
        return mxcsr;
    }
    static void write(uint32_t mxcsr) { __asm__ __volatile__("ldmxcsr %0" ::"m"(mxcsr) : "memory"); }

    const uint32_t before_;
    const bool changed_;
#elif defined(__aarch64__)
    FpEnvironment() : before_(read()) {
        if (before_ != 0) write(0);
    }
    ~FpEnvironment() {
        if (before_ != 0) write(before_);
    }

private:
    static uint64_t read() {
        uint64_t fpcr;
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(fpcr)::"memory");
        return fpcr;
    }
    static void write(uint64_t fpcr) { __asm__ __volatile__("msr fpcr, %0" ::"r"(fpcr) : "memory"); }

    const uint64_t before_;
#else
    FpEnvironment() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FpEnvironment() { std::fesetenv(&before_); }

private:
    std::fenv_t before_;
#endif

public:
    FpEnvironment(const FpEnvironment&) = delete;
    FpEnvironment& operator=(const FpEnvironment&) = delete;
};

}  // namespace aegis
