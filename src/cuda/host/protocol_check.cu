// Host and device share the protocol headers. This file proves, at every build, that all of them compile for the device.
#include "protocol_headers.h"

__global__ void pplx_protocol_check() {}
