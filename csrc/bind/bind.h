// The only folder that includes Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace potok {

template <class T>
using Vector = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Matrix = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

void bind_replay(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_ceiling(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);  // into the module of single kernels

}  // namespace potok
