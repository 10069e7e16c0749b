// Memory for one call of a kernel. Aligned to cache lines; never fails quietly: see scratch_alloc.
#pragma once

#include <cstddef>

namespace hswq {

// Aborts nothing and returns never null: raises std::bad_alloc, which the drivers turn into an error code.
void* scratch_alloc(std::size_t bytes);
void scratch_free(void* p) noexcept;

}  // namespace hswq
