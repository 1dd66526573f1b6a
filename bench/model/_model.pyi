class FabricCosts:
    nics: int
    bytes_per_us: float
    latency_us: float
    ack_us: float
    nic_message_us: float
    post_us: float
    completion_us: float
    poll_us: float
    depth: int
    interleave: int
    chunk_bytes: int

class Shape:
    ranks: int
    node_size: int
    tokens: int
    experts: int
    top_k: int
    hidden: int
    groups: int
    fp8: bool

class KernelTime:
    fixed_us: float
    row_us: float
    def __init__(self, fixed_us: float, row_us: float) -> None: ...

class OurCosts:
    dispatch_send: KernelTime
    dispatch_recv: KernelTime
    combine_send: KernelTime
    combine_recv: KernelTime
    mailbox_us: float
    arrival_us: float
    mapped_us: float
    block_us: float
    word_us: float
    shard_bytes: int
    part_bytes: int
    by_gpu: bool
    gpu_post_us: float
    signal_us: float
    by_node: bool
    combine_fp8: bool
    pass_on_us: float
    pull_us: float
    pull_bytes_per_us: float

class GardenCosts:
    first_us: float
    dispatch_tail_us: float
    combine_tail_us: float
    submit_us: float
    flag_us: float
    route_row_us: float
    private_copies: int

class RowsCosts:
    dispatch: KernelTime
    combine: KernelTime
    gpu_post_us: float
    signal_us: float

class Result:
    @property
    def finished(self) -> list[float]: ...
    @property
    def posted(self) -> float: ...
    @property
    def writes(self) -> int: ...
    @property
    def bytes_posted(self) -> int: ...
    @property
    def bytes_landed(self) -> int: ...
    @property
    def host_us(self) -> float: ...

class Routing:
    @property
    def ids(self) -> list[list[int]]: ...
    def rows_to(self, source: int, target: int) -> int: ...
    def rows_to_node(self, source: int, node: int) -> int: ...

def random_routing(shape: Shape, seed: int) -> Routing: ...
def run_ours(shape: Shape, fabric: FabricCosts, costs: OurCosts, seed: int) -> list[Result]: ...
def run_rows(shape: Shape, fabric: FabricCosts, costs: RowsCosts, seed: int) -> list[Result]: ...
def run_garden(shape: Shape, fabric: FabricCosts, costs: GardenCosts, seed: int) -> list[Result]: ...
def single_write_us(fabric: FabricCosts, submit_us: float, bytes: int) -> float: ...
def paged_writes_us(fabric: FabricCosts, submit_us: float, bytes: int, pages: int) -> float: ...
