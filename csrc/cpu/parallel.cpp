#include "cpu/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/kernels.h"

namespace hswq {
namespace {

// Below this many elementary operations a thread's share costs less than waking it.
constexpr int64_t kWorkPerThread = 1 << 18;
// Pieces a thread: enough that a slow core does not hold up the rest, few enough that each is a good run of
// rows.
constexpr int64_t kPiecesPerThread = 4;

struct Job {
    const std::function<void(int64_t, int64_t)>* body;
    int64_t total, piece;
    std::atomic<int64_t> next{0};
    std::mutex guard;
    std::exception_ptr error;

    void run() noexcept {
        for (;;) {
            const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= total) return;
            try {
                (*body)(begin, std::min(begin + piece, total));
            } catch (...) {
                const std::lock_guard<std::mutex> lock(guard);
                error = std::current_exception();
                next.store(total, std::memory_order_relaxed);
            }
        }
    }
};

class Pool {
  public:
    // One job at a time; a caller that finds the pool busy gets false and works alone.
    bool run(Job& job, int helpers) {
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return false;
        {
            const std::lock_guard<std::mutex> lock(state_);
            while (int(workers_.size()) < helpers)
                workers_.emplace_back([this, i = int(workers_.size())] { serve(i); });
            job_ = &job;
            wanted_ = helpers;
            running_ = helpers;
            ++round_;
        }
        wake_.notify_all();
        job.run();
        std::unique_lock<std::mutex> lock(state_);
        done_.wait(lock, [this] { return running_ == 0; });
        return true;
    }

  private:
    void serve(int index) {
        int64_t seen = 0;
        for (;;) {
            std::unique_lock<std::mutex> lock(state_);
            wake_.wait(lock, [&] { return round_ != seen && index < wanted_; });
            seen = round_;
            Job* job = job_;
            lock.unlock();
            job->run();
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_, state_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    Job* job_ = nullptr;
    int wanted_ = 0, running_ = 0;
    int64_t round_ = 0;
};

// The pool of this process. A forked child has none of its parent's threads, so it starts its own; neither is
// ever destroyed, because workers may still sleep in it when the process ends.
Pool& pool() {
    static std::mutex guard;
    static Pool* mine = nullptr;
    static pid_t owner = 0;
    const std::lock_guard<std::mutex> lock(guard);
    if (owner != getpid()) {
        mine = new Pool;
        owner = getpid();
    }
    return *mine;
}

}  // namespace

void parallel_for(int threads, int64_t total, int64_t unit, int64_t work,
                  const std::function<void(int64_t, int64_t)>& body) {
    if (total <= 0) return;
    const int64_t useful = std::min<int64_t>({threads, work / kWorkPerThread, (total + unit - 1) / unit});
    if (useful <= 1) return body(0, total);
    Job job;
    job.body = &body;
    job.total = total;
    job.piece = ceil_to(std::max<int64_t>(1, total / (useful * kPiecesPerThread)), unit);
    if (!pool().run(job, int(useful) - 1)) job.run();
    if (job.error) std::rethrow_exception(job.error);
}

}  // namespace hswq
