// The emulator in the place of CUDA's header of this name.
#pragma once
#ifndef COURSE_EMULATED
#define COURSE_EMULATED 1
#endif
#include "emu/api.h"
#include "emu/device.h"
#include "emu/launch.h"
