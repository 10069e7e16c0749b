// All matrix products by tiles, with the unit that the instruction set has.

#include "cpu/tiles.inl"
#if defined(__AMX_TILE__)
#include "cpu/tile_unit_amx.inl"
#else
#include "cpu/tile_unit_avx512.inl"
#endif
#include "cpu/tiles_blocked.inl"
#include "cpu/tiles_int8.inl"
#include "cpu/tiles_w4.inl"
#include "cpu/tiles_fp4_norms.inl"
#include "cpu/tiles_fp4.inl"
