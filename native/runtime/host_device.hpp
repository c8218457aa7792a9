// For arithmetic that CPU and GPU share.
#pragma once

#ifdef __CUDACC__
#define KTINJECT_HOST_DEVICE __host__ __device__
#else
#define KTINJECT_HOST_DEVICE
#endif
