DEV float fmodf(float x, float y){return x;}
DEV double fmod(double x, double y){return x;}
