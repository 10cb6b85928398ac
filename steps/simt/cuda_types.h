// CUDA's vector types for a plain C++ compiler, and what the executor and kernels agree on about them.
//
// Kernel code is compiled twice, plain and observed, and both are linked into one program. What is inline here lives in
// a namespace of its own for each, so that the linker never puts one's copy in the place of the other's.
//
// Under observation each type is copied as one word: so a float4 load is the one access that it is on a GPU, whatever
// the compiler makes of a struct.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef SIMT_OBSERVED
#define SIMT_BUILD observed
#else
#define SIMT_BUILD plain
#endif

#define SIMT_INLINE inline __attribute__((always_inline))

namespace simt {

// These two cross between kernels and executor, so there is one of each.
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  SIMT_INLINE constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline namespace SIMT_BUILD {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = uint16_t __attribute__((may_alias));
};
template <>
struct WordOf<4> {
  using type = uint32_t __attribute__((may_alias));
};
template <>
struct WordOf<8> {
  using type = uint64_t __attribute__((may_alias));
};
template <>
struct WordOf<16> {
  typedef uint64_t type __attribute__((vector_size(16), may_alias));
};

// Copies an object of 2, 4, 8 or 16 bytes by one load and one store.
template <class T>
SIMT_INLINE void copy_as_word(T* to, const T* from) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word word = *reinterpret_cast<const Word*>(from);
  if constexpr (sizeof(Word) == 16) {  // the empty statement keeps the compiler from taking the word apart again
    asm("" : "+x"(word));
  } else {
    asm("" : "+r"(word));
  }
  *reinterpret_cast<Word*>(to) = word;
}

// The copy operations of a class: no function can add these to it.
#ifdef SIMT_OBSERVED
#define SIMT_COPIED_AS_WORD(Type)                                                 \
  SIMT_INLINE Type(const Type& other) { simt::copy_as_word<Type>(this, &other); } \
  SIMT_INLINE Type& operator=(const Type& other) {                                \
    simt::copy_as_word<Type>(this, &other);                                       \
    return *this;                                                                 \
  }
#else
#define SIMT_COPIED_AS_WORD(Type)        \
  constexpr Type(const Type&) = default; \
  constexpr Type& operator=(const Type&) = default;
#endif

// T2 and T4 with their makers, for an element type T.
#define SIMT_VECTORS(T, name)                               \
  struct alignas(2 * sizeof(T)) name##2 {                   \
    T x, y;                                                 \
    name##2() = default;                                    \
    SIMT_INLINE constexpr name##2(T x, T y) : x(x), y(y) {} \
    SIMT_COPIED_AS_WORD(name##2)                            \
  };                                                        \
  SIMT_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }
#define SIMT_VECTORS4(T, name)                                                    \
  struct alignas(4 * sizeof(T)) name##4 {                                         \
    T x, y, z, w;                                                                 \
    name##4() = default;                                                          \
    SIMT_INLINE constexpr name##4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} \
    SIMT_COPIED_AS_WORD(name##4)                                                  \
  };                                                                              \
  SIMT_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

SIMT_VECTORS(float, float)
SIMT_VECTORS(int, int)
SIMT_VECTORS(unsigned, uint)
SIMT_VECTORS(double, double)
SIMT_VECTORS(long long, longlong)
SIMT_VECTORS(unsigned long long, ulonglong)
SIMT_VECTORS4(float, float)
SIMT_VECTORS4(int, int)
SIMT_VECTORS4(unsigned, uint)

#undef SIMT_VECTORS
#undef SIMT_VECTORS4

}  // namespace SIMT_BUILD
}  // namespace simt

using simt::dim3, simt::uint3;
using simt::double2, simt::float2, simt::int2, simt::longlong2, simt::uint2, simt::ulonglong2;
using simt::float4, simt::int4, simt::uint4;
using simt::make_double2, simt::make_float2, simt::make_int2, simt::make_uint2;
using simt::make_float4, simt::make_int4, simt::make_uint4;
using simt::make_longlong2, simt::make_ulonglong2;
