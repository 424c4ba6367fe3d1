//! What a kernel is told.

use super::tiles::{Direction, Kernel, Kernels};
use crate::heads::Shape;

/// Number of 64-bit words of the parameter that every kernel takes.
pub const PARAMETER_WORDS: usize = 36;

/// A `[B, H, S, D]` view of device memory whose last dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceView {
    /// Address of the first element.
    pub address: u64,
    /// Elements from one batch row, head and token to the next.
    pub strides: [usize; 3],
}

impl DeviceView {
    /// A contiguous `[.., heads, tokens, head_dim]` view.
    pub fn contiguous(address: u64, heads: usize, tokens: usize, head_dim: usize) -> Self {
        Self { address, strides: [heads * tokens * head_dim, tokens * head_dim, head_dim] }
    }

    /// Whether rows start on 16 bytes.
    fn is_aligned(&self, element_bytes: usize) -> bool {
        self.address.is_multiple_of(16) && self.strides.iter().all(|stride| (stride * element_bytes).is_multiple_of(16))
    }

    fn words(&self) -> [u64; 4] {
        [self.address, self.strides[0] as u64, self.strides[1] as u64, self.strides[2] as u64]
    }
}

/// Addresses of the running state of forward, f32, zeros at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct State {
    /// `[B, Hkv, Sq, G, D]`.
    pub out: u64,
    /// `[B, Hkv, Sq, G]`.
    pub max: u64,
    /// `[B, Hkv, Sq, G]`.
    pub sum: u64,
}

/// Addresses of what backward reads and writes besides the operands, f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Grads {
    /// Natural log-sum-exp, `[B, Hkv, Sq, G]`.
    pub lse: u64,
    /// From [`Launch::output_dot`], `[B, Hkv, Sq, G]`.
    pub delta: u64,
    /// `[B, Hkv, Sq, G, D]`, added to: zeros at the start of the pass.
    pub d_query: u64,
    /// `[B, Hkv, keys, D]` of this chunk, written where keys are visited: zeros before.
    pub d_key: u64,
    /// As `d_key`.
    pub d_value: u64,
}

/// Addresses of a [`super::WorkList`] and the bounds in device memory, u32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// [`super::WorkList::tiles`].
    pub tiles: u64,
    /// [`super::WorkList::entries`].
    pub entries: u64,
    /// [`super::WorkList::blocks`].
    pub blocks: usize,
    /// First and end of the visible positions of each query, `[B, Sq, 2]`.
    pub bounds: u64,
}

/// A kernel launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Thread blocks. A launch of none is not to be made.
    pub grid: [u32; 3],
    /// The parameter, as the kernel's struct lies in memory.
    pub parameter: [u64; PARAMETER_WORDS],
}

#[derive(Default)]
struct Parameters {
    query: DeviceView,
    key: DeviceView,
    value: DeviceView,
    out: DeviceView,
    d_out: DeviceView,
    state: State,
    grads: Grads,
    work: Work,
    keys: usize,
    scale: f32,
}

impl Parameters {
    fn words(&self, kernels: &Kernels, shape: Shape) -> [u64; PARAMETER_WORDS] {
        let bytes = kernels.element().bytes();
        let views = [self.query, self.key, self.value, self.out, self.d_out];
        let whole = (shape.head_dim * bytes).is_multiple_of(16);
        let aligned = whole && views.iter().all(|view| view.is_aligned(bytes));
        let Self { state, grads, work, .. } = self;
        let addresses =
            [state.out, state.max, state.sum, grads.lse, grads.delta, grads.d_query, grads.d_key, grads.d_value];
        let lists = [work.bounds, work.tiles, work.entries];
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let small = |x: usize| u32::try_from(x).expect("batch, heads, tokens and group fit into 32 bits");
        let numbers = [
            shape.rows() as u64,
            pair(small(shape.batch), small(shape.key_heads)),
            pair(small(shape.group()), small(shape.queries)),
            pair(small(self.keys), small(shape.head_dim)),
            pair(u32::from(aligned), self.scale.to_bits()),
        ];
        let words = views.iter().flat_map(DeviceView::words).chain(addresses).chain(lists).chain(numbers);
        let mut out = [0; PARAMETER_WORDS];
        out.iter_mut().zip(words).for_each(|(out, word)| *out = word);
        out
    }
}

/// Rows that one thread block of `finish` and `output_dot` takes.
const ROWS_PER_BLOCK: usize = 8;

impl Launch {
    /// The parameter as bytes.
    pub fn parameter_bytes(&self) -> Vec<u8> {
        self.parameter.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn new(kernels: &Kernels, direction: Direction, shape: Shape, parameters: Parameters) -> Self {
        assert_eq!(kernels.head_dim(), shape.head_dim, "kernels of another head size");
        let grid = [parameters.work.blocks as u32, shape.key_heads as u32, 1];
        Self { kernel: kernels.kernel(direction).clone(), grid, parameter: parameters.words(kernels, shape) }
    }

    fn per_row(kernels: &Kernels, name: &str, shape: Shape, parameters: Parameters) -> Self {
        let kernel = Kernel { name: name.into(), threads: 32 * ROWS_PER_BLOCK as u32, shared_bytes: 0 };
        let grid = [shape.rows().div_ceil(ROWS_PER_BLOCK) as u32, 1, 1];
        Self { kernel, grid, parameter: parameters.words(kernels, shape) }
    }

    /// Continues `state` with one chunk of keys; `work` comes from [`super::WorkList::by_queries`] for
    /// [`Direction::Forward`].
    pub fn forward(
        kernels: &Kernels,
        shape: Shape,
        [query, key, value]: [DeviceView; 3],
        state: State,
        work: Work,
        scale: f32,
    ) -> Self {
        let parameters = Parameters { query, key, value, state, work, scale, ..Default::default() };
        Self::new(kernels, Direction::Forward, shape, parameters)
    }

    /// Output and log-sum-exp (natural, f32 `[B, Hkv, Sq, G]` at `lse`) from the state.
    pub fn finish(kernels: &Kernels, shape: Shape, state: State, out: DeviceView, lse: u64) -> Self {
        let grads = Grads { lse, ..Default::default() };
        Self::per_row(kernels, "finish", shape, Parameters { out, state, grads, ..Default::default() })
    }

    /// Sums of `out * d_out` over each head, to `delta`.
    pub fn output_dot(kernels: &Kernels, shape: Shape, out: DeviceView, d_out: DeviceView, delta: u64) -> Self {
        let grads = Grads { delta, ..Default::default() };
        Self::per_row(kernels, "output_dot", shape, Parameters { out, d_out, grads, ..Default::default() })
    }

    /// Adds the chunk's part to the gradient of the queries; `work` as for [`Launch::forward`], for
    /// [`Direction::BackwardQueries`].
    pub fn backward_queries(
        kernels: &Kernels,
        shape: Shape,
        [query, key, value, d_out]: [DeviceView; 4],
        grads: Grads,
        work: Work,
        scale: f32,
    ) -> Self {
        let parameters = Parameters { query, key, value, d_out, grads, work, scale, ..Default::default() };
        Self::new(kernels, Direction::BackwardQueries, shape, parameters)
    }

    /// Gradients of the chunk's `keys` keys and values; `work` comes from [`super::WorkList::by_keys`] for
    /// [`Direction::BackwardKeys`].
    pub fn backward_keys(
        kernels: &Kernels,
        shape: Shape,
        [query, key, value, d_out]: [DeviceView; 4],
        grads: Grads,
        (work, keys): (Work, usize),
        scale: f32,
    ) -> Self {
        let parameters = Parameters { query, key, value, d_out, grads, work, keys, scale, ..Default::default() };
        Self::new(kernels, Direction::BackwardKeys, shape, parameters)
    }
}
