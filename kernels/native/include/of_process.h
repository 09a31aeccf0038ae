// What only the process that made it may use: a child made by fork has copies of it, but no threads.
#pragma once

#include <unistd.h>

namespace aegis {

// A T that threads share. In a forked child it is left alone for good: its threads are not there to
// be joined, its mutex may be held by one of them, and destroying a condition waits for them for ever.
template <class T>
class OfProcess {
  public:
    OfProcess() : process_(getpid()), value_(new T) {}
    ~OfProcess() {
        if (here()) delete value_;
    }
    OfProcess(const OfProcess&) = delete;
    OfProcess& operator=(const OfProcess&) = delete;

    bool here() const { return getpid() == process_; }
    T* operator->() const { return value_; }

  private:
    const pid_t process_;
    T* const value_;
};

}  // namespace aegis
