// The door to Python: launchers with their types erased. So pybind11, which takes longer to compile than a program, is
// compiled once for all of them (binding.cpp) and not by nvcc.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace course {

// One argument or result on its way: an address, a whole number or a truth value, or a floating-point number.
union Value {
    int64_t whole;
    double real;
};

struct Function {
    std::string name;
    std::string types;  // one letter for each parameter, and the result's: w whole, r real, - none
    std::function<Value(const Value*)> call;
};

struct Module {
    std::vector<Function> functions;
};

template <typename T>
constexpr char letter() {
    static_assert(std::is_void_v<T> || std::is_pointer_v<T> || std::is_arithmetic_v<T> || std::is_enum_v<T>,
                  "bind: a launcher takes pointers and numbers");
    return std::is_void_v<T> ? '-' : std::is_floating_point_v<T> ? 'r' : 'w';
}

template <typename T>
T unpack(Value value) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(value.whole);
    if constexpr (std::is_floating_point_v<T>) return T(value.real);
    if constexpr (!std::is_pointer_v<T> && !std::is_floating_point_v<T>) return T(value.whole);
}

template <typename R, typename... Args, size_t... I>
Value call_with(R (*function)(Args...), const Value* values, std::index_sequence<I...>) {
    Value result{};
    if constexpr (std::is_void_v<R>)
        function(unpack<Args>(values[I])...);
    else if constexpr (std::is_floating_point_v<R>)
        result.real = double(function(unpack<Args>(values[I])...));
    else
        result.whole = int64_t(function(unpack<Args>(values[I])...));
    return result;
}

// Python calls function(address or number, ..., stream); which tensor is which is the wrapper's business.
template <typename R, typename... Args>
void bind(Module& m, const char* name, R (*function)(Args...)) {
    m.functions.push_back({name, {letter<Args>()..., letter<R>()}, [function](const Value* values) {
                               return call_with(function, values, std::index_sequence_for<Args...>{});
                           }});
}

}  // namespace course
