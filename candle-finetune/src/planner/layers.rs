//! The operations of decoder and vision layers with the sizes of their results, in the order in which the models run them.

use crate::family::{AttentionShape, ExpertsShape};

use super::tape::{Rule, Tape, Value};

/// Bytes of a number of sums.
pub(super) const WIDE: u64 = 4;
/// Columns that rows of sums in the CPU's attention are longer than heads.
const ROW_PADDING: u64 = 16;
/// Tokens between two states that the delta rule keeps.
const STATE_BLOCK: u64 = 1024;

/// What sizes depend on beside the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Bytes of a number of weights and results.
    pub number: u64,
    /// The CPU has operations of its own where other devices put tensor operations together.
    pub cpu: bool,
}

impl Numbers {
    /// Whether operations in one pass over memory apply.
    fn one_pass(self) -> bool {
        self.cpu && self.number == WIDE
    }
}

/// Writes operations on `rows` tokens of one part of a model.
pub(super) struct Layers<'a> {
    pub tape: &'a mut Tape,
    pub numbers: Numbers,
    pub rows: u64,
    /// The part's weights are trained.
    pub trained: bool,
    /// Rank of adapters, which are trained in place of the weights.
    pub lora_rank: Option<u64>,
    pub clipped: bool,
    /// What is written runs once more in backward.
    pub runs_again: bool,
    /// Keys and values of other ranks that are held in forward, and together with gradients in backward.
    pub remote: [u64; 2],
}

impl Layers<'_> {
    /// Bytes of one result of `width` per token.
    pub fn bytes(&self, width: u64) -> u64 {
        self.rows * width * self.numbers.number
    }

    fn wide(&self, width: u64) -> u64 {
        self.rows * width * WIDE
    }

    /// A weight of the part, beside adapters a constant.
    fn weight(&mut self, numbers: u64) -> Value {
        self.tape.weight(numbers * self.numbers.number, self.trained && self.lora_rank.is_none())
    }

    /// An elementwise result, in as many steps over sums as the tensor operations take.
    fn elementwise(&mut self, args: &[Value], width: u64, steps: [u64; 2]) -> Value {
        let steps = if self.numbers.one_pass() { [0, 0] } else { steps.map(|steps| steps * self.wide(width)) };
        let bytes = self.bytes(width);
        self.tape.op_with(args, [bytes, bytes], 0, steps, Rule::Made)
    }

    /// `weight` numbers, 0 for none.
    pub fn norm(&mut self, x: Value, width: u64, weight: u64) -> Value {
        let weight = (weight > 0).then(|| self.weight(weight));
        let mut args = vec![x];
        args.extend(weight);
        if !self.numbers.cpu || self.numbers.one_pass() {
            return self.elementwise(&args, width, [3, 5]);
        }
        // The CPU norms short types in f32: the widened argument and result are part of the graph.
        let wide = self.wide(width);
        args[0] = self.tape.op(&[x], wide, Rule::Made);
        let normed = self.tape.op(&args, wide, Rule::Made);
        let bytes = self.bytes(width);
        self.tape.op_with(&[normed], [bytes, bytes], 0, [0, wide], Rule::Made)
    }

    pub fn rope(&mut self, x: Value, width: u64) -> Value {
        self.elementwise(&[x], width, [3, 3])
    }

    pub fn gated(&mut self, gate: Value, up: Value, width: u64) -> Value {
        self.elementwise(&[gate, up], width, [3, 5])
    }

    pub fn activated(&mut self, x: Value, width: u64) -> Value {
        self.elementwise(&[x], width, [2, 4])
    }

    pub fn sum(&mut self, a: Value, b: Value, width: u64) -> Value {
        let bytes = self.bytes(width);
        self.tape.op(&[a, b], bytes, Rule::Passed)
    }

    /// A tensor operation that makes a gradient for its argument.
    pub fn mapped(&mut self, x: Value, width: u64) -> Value {
        let bytes = self.bytes(width);
        self.tape.op(&[x], bytes, Rule::Made)
    }

    /// A projection with its adapter, bounds and bias.
    pub fn linear(&mut self, x: Value, inputs: u64, outputs: u64) -> Value {
        let x = if self.clipped { self.clamped(x, inputs) } else { x };
        let bytes = self.bytes(outputs);
        let weight = self.weight(inputs * outputs);
        let y = match self.lora_rank {
            None => self.tape.op(&[x, weight], bytes, Rule::Made),
            Some(rank) => {
                let a = self.tape.weight(rank * inputs * WIDE, true);
                let b = self.tape.weight(rank * outputs * WIDE, true);
                // The adapter's result, and in backward the gradient and the input, in f32.
                let forward =
                    self.wide(outputs + rank) + if self.numbers.number < WIDE { self.wide(inputs) } else { 0 };
                let backward = self.wide(outputs + 3 * inputs + 2 * rank);
                self.tape.op_with(&[x, a, b], [bytes, bytes], 0, [forward, backward], Rule::Made)
            }
        };
        if self.clipped { self.clamped(y, outputs) } else { y }
    }

    /// Two choices between a value and a bound; each keeps a byte per number.
    fn clamped(&mut self, x: Value, width: u64) -> Value {
        let (bytes, choice) = (self.bytes(width), self.rows * width);
        let one = |tape: &mut Tape, x| tape.op_with(&[x], [bytes, bytes], choice, [0, 2 * bytes], Rule::Made);
        let x = one(self.tape, x);
        one(self.tape, x)
    }

    pub fn with_bias(&mut self, x: Value, width: u64) -> Value {
        let (bytes, bias) = (self.bytes(width), self.weight(width));
        self.tape.op_with(&[x, bias], [bytes, bytes], 0, [0, bytes], Rule::Passed)
    }

    /// The gated MLP from its norm to the last projection.
    pub fn mlp(&mut self, x: Value, hidden: u64, width: u64) -> Value {
        let gate = self.linear(x, hidden, width);
        let up = self.linear(x, hidden, width);
        let gated = self.gated(gate, up, width);
        self.linear(gated, width, hidden)
    }

    /// Queries, keys and values (and first the gate, where there is one) of normed tokens. `value_norm`: values have a norm
    /// without a weight.
    pub fn project(&mut self, x: Value, hidden: u64, shape: &AttentionShape, value_norm: bool) -> Vec<Value> {
        let mut all = self.queries(x, hidden, shape);
        all.extend(self.keys_values(x, hidden, shape, value_norm));
        all
    }

    /// The gate, where there is one, and the queries.
    pub fn queries(&mut self, x: Value, hidden: u64, shape: &AttentionShape) -> Vec<Value> {
        let (width, head_dim) = ((shape.query_heads * shape.head_dim) as u64, shape.head_dim as u64);
        if !shape.gated {
            let query = self.linear(x, hidden, width);
            let query = self.norm(query, width, head_dim);
            return vec![self.rope(query, width)];
        }
        let both = self.linear(x, hidden, 2 * width);
        let half = self.bytes(width);
        let part = |tape: &mut Tape, bytes| tape.op_with(&[both], [bytes, half], 0, [0, 0], Rule::Padded);
        let query = part(self.tape, half);
        let query = self.norm(query, width, head_dim);
        let query = self.rope(query, width);
        vec![part(self.tape, half), query]
    }

    pub fn keys_values(&mut self, x: Value, hidden: u64, shape: &AttentionShape, value_norm: bool) -> [Value; 2] {
        let (width, head_dim) = ((shape.key_heads * shape.head_dim) as u64, shape.head_dim as u64);
        let key = self.linear(x, hidden, width);
        let mut value = if shape.keys_are_values { key } else { self.linear(x, hidden, width) };
        let key = self.norm(key, width, head_dim);
        let key = self.rope(key, width);
        if value_norm {
            value = self.norm(value, width, 0);
        }
        [key, value]
    }

    /// Attention of queries over `keys` tokens in `[key, value]` or one gathered tensor.
    pub fn attend(&mut self, args: &[Value], shape: &AttentionShape, keys: u64) -> Value {
        let padding = if self.numbers.cpu { ROW_PADDING } else { 0 };
        let (heads, head_dim) = (shape.query_heads as u64, shape.head_dim as u64);
        let (query_width, key_width) = (heads * head_dim, (shape.key_heads * shape.head_dim) as u64);
        let lse = self.wide(heads);
        let sums = self.wide(heads * (head_dim + padding)) + 2 * lse;
        // Of a chunk, as operands of products; on other devices than the CPU kernels read it where it is.
        let panels = if self.numbers.cpu { 2 * keys * key_width * WIDE } else { 0 };
        // The CPU has those of a chunk beside the sums that they become.
        let copies = if self.numbers.cpu { 2 } else { 1 };
        let gradients = copies * 2 * keys * key_width * WIDE;
        let [forward, backward] = self.remote;
        let scratch = [sums + panels + forward, sums + 2 * lse + panels + gradients + backward];
        let bytes = self.bytes(query_width);
        self.tape.op_with(args, [bytes, bytes], lse, scratch, Rule::Made)
    }

    /// Router and experts: `[rows, hidden]` to the same. `own_input`: the router norms and scales its input.
    pub fn experts(&mut self, x: Value, routed: Value, hidden: u64, shape: ExpertsShape, own_input: bool) -> Value {
        let (count, top_k, width) = (shape.count as u64, shape.top_k as u64, shape.width as u64);
        let wide = |layers: &mut Self, x, width: u64| {
            let bytes = layers.wide(width);
            layers.tape.op(&[x], bytes, Rule::Made)
        };
        let mut router = routed;
        if self.numbers.number < WIDE {
            router = wide(self, router, hidden);
        }
        if own_input {
            router = wide(self, router, hidden); // the norm
            let bytes = self.wide(hidden);
            // Candle's product makes a gradient of a frozen scale as well, as large as the rows, and keeps it to the end.
            let scale = match (self.trained && self.lora_rank.is_none(), self.runs_again) {
                (false, false) => self.tape.input(bytes, true),
                _ => self.weight(hidden),
            };
            router = self.tape.op_with(&[router, scale], [bytes, bytes], 0, [0, bytes], Rule::Made);
            router = wide(self, router, hidden); // the root
        }
        let matrix = self.weight(hidden * count);
        let bytes = self.wide(count);
        let logits = self.tape.op_with(&[router, matrix], [bytes, bytes], 0, [4 * bytes, bytes], Rule::Made);
        // Chosen logits, differences, exponentials, sums, shares, scaled.
        let mut weights = wide(self, logits, top_k);
        for _ in 0..4 {
            weights = wide(self, weights, top_k);
        }
        let rows = self.rows;
        self.rows *= top_k;
        let stacked = self.weight(count * 2 * width * hidden);
        let both = self.bytes(2 * width);
        let gate_up = self.tape.op(&[x, stacked], both, Rule::Made);
        let wide_bytes = self.wide(2 * width);
        let gate_up = match self.numbers.number < WIDE {
            true => self.tape.op(&[gate_up], wide_bytes, Rule::Made),
            false => gate_up,
        };
        let active_bytes = self.wide(width);
        let active = self.tape.op(&[gate_up, weights], active_bytes, Rule::Made);
        let active = match self.numbers.number < WIDE {
            true => self.mapped(active, width),
            false => active,
        };
        self.rows = rows;
        let down = self.weight(count * hidden * width);
        let (bytes, sums) = (self.bytes(hidden), self.wide(hidden));
        self.tape.op_with(&[active, down], [bytes, bytes], 0, [sums, 0], Rule::Made)
    }

    /// What a delta net projects: the gate of the output, convolved queries, keys and values, decay, strength.
    pub fn delta_project(&mut self, x: Value, hidden: u64, heads: &candle_cp::DeltaHeads, taps: u64) -> Vec<Value> {
        let (channels, values) = (heads.width() as u64, (heads.value_heads * heads.value_dim) as u64);
        let count = heads.value_heads as u64;
        let qkv = self.linear(x, hidden, channels);
        let filter = self.weight(channels * taps);
        let bytes = self.bytes(channels);
        let widened = if self.numbers.number < WIDE { 2 * self.wide(channels) } else { 0 };
        let qkv = self.tape.op_with(&[qkv, filter], [bytes, bytes], 0, [widened, 2 * widened], Rule::Made);
        let decay = self.linear(x, hidden, count);
        let (rate, bias) = (self.weight(count), self.weight(count));
        let wide = self.wide(count);
        // In f64, step by step.
        let decay = self.tape.op_with(&[decay, rate, bias], [wide, wide], 0, [8 * wide, 12 * wide], Rule::Made);
        let strength = self.linear(x, hidden, count);
        let strength = if self.numbers.number < WIDE { self.tape.op(&[strength], wide, Rule::Made) } else { strength };
        let strength = self.tape.op(&[strength], wide, Rule::Made);
        let gate = self.linear(x, hidden, values);
        vec![gate, qkv, decay, strength]
    }

    /// The delta rule to the last projection.
    pub fn delta_mix(&mut self, projected: &[Value], hidden: u64, heads: &candle_cp::DeltaHeads) -> Value {
        let (channels, values) = (heads.width() as u64, (heads.value_heads * heads.value_dim) as u64);
        let states = (heads.value_heads * heads.key_dim * heads.value_dim) as u64 * WIDE;
        let saved = self.rows.div_ceil(STATE_BLOCK) * states;
        let widened = if self.numbers.number < WIDE { self.wide(channels) } else { 0 };
        let [forward, backward] = self.remote;
        let scratch = [widened + self.wide(values) + forward, widened + self.wide(channels + values) + backward];
        let bytes = self.bytes(values);
        let out = self.tape.op_with(&projected[1..], [bytes, bytes], saved, scratch, Rule::Made);
        let normed = self.norm(out, values, heads.value_dim as u64);
        let gated = self.gated(projected[0], normed, values);
        self.linear(gated, values, hidden)
    }
}
