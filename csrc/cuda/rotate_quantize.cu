// placeholder replaced below
__global__ void hswq_nothing() {}
