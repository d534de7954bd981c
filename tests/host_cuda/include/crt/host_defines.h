// What CUDA's headers need of the compiler's own header, which comes with 40 MB of compiler. For g++ on the host.
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __inline_hint__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __nv_pure__
#define __specialization_static static
#ifndef __forceinline__
#define __forceinline__ inline
#endif
