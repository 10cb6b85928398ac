// Included before each copied kernel file: whether a synchronisation is in its place or has been taken out. (main.cpp)
#pragma once

namespace synchronisations {
bool kept(int site);
}
