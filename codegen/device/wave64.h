// Lanes that run together on CDNA (gfx9).
#define WARP_SIZE 64
