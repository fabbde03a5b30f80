// Every extension's Python module: what course_module (the program's COURSE_MODULE) binds, as functions of addresses and
// numbers. Errors arrive as Python's own: std::invalid_argument is a ValueError, std::runtime_error a RuntimeError.
#include "binding.h"

#include <pybind11/pybind11.h>

void course_module(course::Module& m);

namespace py = pybind11;

static py::object call(const course::Function& f, const py::args& args) {
    if (args.size() + 1 != f.types.size())
        throw py::type_error(f.name + " takes " + std::to_string(f.types.size() - 1) + " arguments (the stream is the " +
                             "last), got " + std::to_string(args.size()));
    std::vector<course::Value> values(f.types.size());
    for (size_t i = 0; i < args.size(); i++) {
        const bool whole = f.types[i] == 'w';
        if (whole && !PyIndex_Check(args[i].ptr()))
            throw py::type_error(f.name + ": argument " + std::to_string(i) + " is a pointer or a whole number");
        if (whole)
            values[i].whole = args[i].cast<int64_t>();
        else
            values[i].real = args[i].cast<double>();
    }
    const course::Value result = f.call(values.data());
    switch (f.types.back()) {
        case 'w': return py::int_(result.whole);
        case 'r': return py::float_(result.real);
        default: return py::none();
    }
}

PYBIND11_MODULE(kernels, m) {
    course::Module bound;
    course_module(bound);
    for (const course::Function& f : bound.functions)
        m.def(f.name.c_str(), [f](const py::args& args) { return call(f, args); });
}
