// Which instruction set the kernels run with: found at run time, limited by limit_isa().
#pragma once

namespace hswq {

// Each level includes the ones before it. `avx512` means F, BW, DQ, VL, VBMI, VNNI and BF16; `amx` adds the
// int8 and bf16 tiles.
enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, amx = 3 };

constexpr int kIsaCount = 4;

const char* isa_name(Isa isa);
Isa hardware_isa();
// The level in use.
Isa current_isa();
// Limits the level for the whole process ("" lifts the limit); returns 0, or -1 for a name that is none.
int limit_isa(const char* name);

}  // namespace hswq
