// Dividing a range over threads: a small pool of workers that sleep between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace hswq {

// Calls body(begin, end) for pieces that cover [0, total), in units of `unit` rows, on up to `threads`
// threads, this one included. What a piece computes must not depend on how the range was cut. `work` is the
// whole range's cost in elementary operations: little work stays on this thread. Exceptions of the body reach
// the caller.
void parallel_for(int threads, int64_t total, int64_t unit, int64_t work,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace hswq
