// One function a subject; module.cpp lists them.
#pragma once

#include <nanobind/nanobind.h>

namespace ktinject {

void init_system(nanobind::module_& m);
void init_devices(nanobind::module_& m);
void init_experts(nanobind::module_& m);
void init_handoff(nanobind::module_& m);
void init_expert_cache(nanobind::module_& m);
void init_linear(nanobind::module_& m);
void init_int4_linear(nanobind::module_& m);
void init_decode_ops(nanobind::module_& m);
void init_decoder(nanobind::module_& m);
void init_prompts(nanobind::module_& m);
void init_watch(nanobind::module_& m);
void init_streamed(nanobind::module_& m);

}  // namespace ktinject
