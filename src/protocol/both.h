// Marks functions that are no constexpr and run on both sides, as templates on the atomics of host or device do.
#pragma once

#ifdef __CUDACC__
#define PPLX_BOTH __host__ __device__
#else
#define PPLX_BOTH
#endif
