// What the files of native_test share.
#pragma once

#include <string>

// Counts a check, and prints `what` where it does not hold.
bool check(bool holds, const std::string& what);

void test_plan();
