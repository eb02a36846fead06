/* Input of `cargo xtask bindings`: the public headers of rdma-core, nothing else. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
