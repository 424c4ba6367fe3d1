//! A forward and backward pass as a list of operations with sizes, and what memory they need at a time.
//!
//! The walk does what Candle does: forward keeps the result of every operation that leads to something trained; backward
//! goes through them from the last to the first, hands each the gradient of its result, and adds what it gives to the
//! gradients of its arguments, the first time to zeros. Kept results are released at the very end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The result of an operation, or a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Value(usize);

#[derive(Debug, Clone)]
struct Node {
    /// Of the gradient.
    grad_bytes: u64,
    tracked: bool,
    is_weight: bool,
}

/// How an operation's backward makes gradients.
#[derive(Debug, Clone)]
pub(super) enum Rule {
    /// One for each argument, then each is added.
    Made,
    /// The incoming one is added as it is.
    Passed,
    /// The incoming one is padded with zeros to the size of the argument, then added.
    Padded,
    /// They are there since forward; the bytes are those of `saved`.
    Ready,
    /// The part runs again.
    Again(Box<Part>),
}

/// A recomputed part of the model: a first stage, perhaps, and a second one that gets the same inputs and what the first
/// made.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub first: Option<Stage>,
    pub second: Stage,
}

/// A graph of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Stage {
    pub tape: Tape,
    /// Leaves that stand for the part's inputs, then for what the first stage made.
    pub inputs: Vec<Value>,
    pub outputs: Vec<Value>,
}

#[derive(Debug, Clone)]
struct Op {
    out: Value,
    args: Vec<Value>,
    /// Storage of the result.
    bytes: u64,
    /// What the operation keeps beside it.
    saved: u64,
    /// At work in forward and in backward, then released.
    scratch: [u64; 2],
    rule: Rule,
    section: Arc<str>,
}

/// The operations.
#[derive(Debug, Clone, Default)]
pub(super) struct Tape {
    nodes: Vec<Node>,
    ops: Vec<Op>,
    section: Option<Arc<str>>,
}

/// The moment at which most memory was needed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peak {
    pub bytes: u64,
    /// Of these, kept by forward.
    pub kept: u64,
    /// Of these, gradients of weights.
    pub weight_gradients: u64,
    /// What was being done.
    pub place: String,
}

/// What becomes of gradients of recomputed layers that backward is through with: they are summed over ranks, in f32, and a
/// share stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Giving {
    /// Bytes of a gradient in the type of the weights and in that of the sums.
    pub widths: [u64; 2],
    pub ranks: u64,
    /// The most bytes of gradients whose sums are on their way at a time, in the type of the sums.
    pub on_the_way: u64,
}

/// Counts what is held.
#[derive(Debug, Default)]
pub(super) struct Meter {
    live: u64,
    kept: u64,
    /// Gradients of weights that are not summed yet, by now.
    pub weight_gradients: u64,
    /// Sums of those that were given away: this rank's shares, and what is still on its way, by now.
    pub shares: u64,
    /// Of these, what is on its way: buckets end to end and what comes from other ranks.
    on_the_way: u64,
    /// All that was given away, in the type of the sums.
    given: u64,
    giving: Option<Giving>,
    /// Of `weight_gradients`, those within recomputed parts.
    inside: u64,
    layer: Option<Arc<str>>,
    pass: &'static str,
    section: Option<Arc<str>>,
    pub peak: Peak,
    /// The most that forward kept.
    pub most_kept: u64,
}

impl Meter {
    pub fn new(giving: Option<Giving>) -> Self {
        Self { giving, ..Self::default() }
    }

    /// Backward comes to a recomputed part of a layer, by its section.
    fn enter(&mut self, section: &Arc<str>) {
        let Some(Giving { widths: [narrow, wide], ranks, on_the_way }) = self.giving else { return };
        let layer = |section: &Arc<str>| section.split(',').next().unwrap_or_default().to_string();
        if self.layer.replace(section.clone()).is_none_or(|before| layer(&before) == layer(section)) {
            return;
        }
        let given = std::mem::take(&mut self.inside);
        let sum = given / narrow * wide;
        self.given += sum;
        self.settle(0);
        // Made while the gradients are there: end to end, and what comes from other ranks. One rank's sum is its share.
        match ranks {
            1 => self.spike(sum),
            _ => self.settle(2 * self.given.min(on_the_way)),
        }
        self.weight_gradients -= given;
        self.sub(given);
        self.shares += sum / ranks;
        self.add(sum / ranks);
    }

    /// From here on this much is on its way.
    fn settle(&mut self, bytes: u64) {
        self.sub(self.on_the_way);
        self.shares = self.shares + bytes - self.on_the_way;
        self.on_the_way = bytes;
        self.add(bytes);
    }

    pub fn add(&mut self, bytes: u64) {
        self.live += bytes;
        if self.live > self.peak.bytes {
            let section = self.section.as_deref().unwrap_or("start");
            let (kept, weight_gradients) = (self.kept, self.weight_gradients);
            self.peak = Peak { bytes: self.live, kept, weight_gradients, place: format!("{}, {section}", self.pass) };
        }
    }

    pub fn sub(&mut self, bytes: u64) {
        self.live -= bytes;
    }

    pub fn spike(&mut self, bytes: u64) {
        self.add(bytes);
        self.sub(bytes);
    }

    fn keep(&mut self, bytes: u64) {
        self.kept += bytes;
        self.most_kept = self.most_kept.max(self.kept);
        self.add(bytes);
    }

    fn release(&mut self, bytes: u64) {
        self.kept -= bytes;
        self.sub(bytes);
    }
}

impl Tape {
    /// Names what follows.
    pub fn section(&mut self, name: impl Into<String>) {
        self.section = Some(name.into().into());
    }

    /// A leaf whose gradient is wanted or not.
    pub fn input(&mut self, bytes: u64, tracked: bool) -> Value {
        self.node(bytes, tracked, false)
    }

    /// A weight.
    pub fn weight(&mut self, bytes: u64, trained: bool) -> Value {
        self.node(bytes, trained, true)
    }

    fn node(&mut self, grad_bytes: u64, tracked: bool, is_weight: bool) -> Value {
        self.nodes.push(Node { grad_bytes, tracked, is_weight });
        Value(self.nodes.len() - 1)
    }

    pub fn is_tracked(&self, value: Value) -> bool {
        self.nodes[value.0].tracked
    }

    /// An operation with a result of `bytes`, its own storage.
    pub fn op(&mut self, args: &[Value], bytes: u64, rule: Rule) -> Value {
        self.op_with(args, [bytes, bytes], 0, [0, 0], rule)
    }

    /// A result in the storage of its argument, as large as `bytes`.
    pub fn view(&mut self, arg: Value, bytes: u64) -> Value {
        self.op_with(&[arg], [0, bytes], 0, [0, 0], Rule::Passed)
    }

    /// Storage and size of the result, what is kept beside it, and what is needed on the way, in forward and in backward.
    pub fn op_with(
        &mut self,
        args: &[Value],
        [bytes, grad_bytes]: [u64; 2],
        saved: u64,
        scratch: [u64; 2],
        rule: Rule,
    ) -> Value {
        // A recomputed part is in the graph whatever its inputs are: its weights need backward to come there.
        let tracked = matches!(rule, Rule::Again(_)) || args.iter().any(|&arg| self.is_tracked(arg));
        let out = self.node(grad_bytes, tracked, false);
        let section = self.section.clone().unwrap_or_else(|| "".into());
        self.ops.push(Op { out, args: args.to_vec(), bytes, saved, scratch, rule, section });
        out
    }

    /// Forward with the graph kept. What leads to nothing that is trained is released at the end of its section, but for
    /// the last result.
    pub fn forward(&self, meter: &mut Meter) {
        meter.pass = "forward";
        self.forward_kept(meter, true);
    }

    fn forward_kept(&self, meter: &mut Meter, names: bool) {
        let (mut loose, mut carried, mut section) = (0, 0, None);
        for op in &self.ops {
            if names {
                meter.section = Some(op.section.clone());
            }
            if section.as_ref() != Some(&op.section) {
                meter.sub(loose - carried);
                loose = carried;
                section = Some(op.section.clone());
            }
            if let Rule::Again(part) = &op.rule {
                part.forward(meter);
            }
            meter.spike(op.scratch[0]);
            if self.is_tracked(op.out) {
                meter.keep(op.bytes + op.saved);
                continue;
            }
            meter.add(op.bytes);
            loose += op.bytes;
            if op.bytes > 0 {
                carried = op.bytes; // a view holds what it looks at
            }
        }
        meter.sub(loose);
    }

    /// Bytes that forward keeps.
    pub fn kept(&self) -> u64 {
        self.ops.iter().filter(|op| self.is_tracked(op.out)).map(|op| op.bytes + op.saved).sum()
    }

    /// All results at a time; those in `outputs` stay.
    fn forward_loose(&self, meter: &mut Meter, outputs: &[Value]) {
        let all: u64 = self.ops.iter().map(|op| op.bytes + op.saved).sum();
        let most = self.ops.iter().map(|op| op.scratch[0]).max().unwrap_or(0);
        meter.add(all);
        meter.spike(most);
        meter.sub(all - self.bytes_of(outputs));
    }

    /// Sizes of these, together.
    pub fn bytes_of(&self, values: &[Value]) -> u64 {
        values.iter().map(|value| self.nodes[value.0].grad_bytes).sum()
    }

    /// Backward from values whose gradients are held. Those of tracked leaves and of weights stay held: those that have
    /// one.
    pub fn backward(&self, meter: &mut Meter, seeds: &[Value], names: bool) -> BTreeSet<Value> {
        if names {
            meter.pass = "backward";
        }
        let mut gradients: BTreeMap<Value, u64> =
            seeds.iter().map(|&seed| (seed, self.nodes[seed.0].grad_bytes)).collect();
        for op in self.ops.iter().rev() {
            let Some(incoming) = gradients.remove(&op.out) else { continue };
            if names {
                meter.section = Some(op.section.clone());
            }
            let wanted: Vec<Value> = op.args.iter().copied().filter(|&arg| self.is_tracked(arg)).collect();
            let made: u64 = self.bytes_of(&wanted);
            match &op.rule {
                Rule::Passed => wanted.iter().for_each(|&arg| self.accumulate(meter, &mut gradients, arg)),
                Rule::Made | Rule::Padded => {
                    let zeros = match op.rule {
                        Rule::Padded => made.saturating_sub(incoming),
                        _ => 0,
                    };
                    meter.add(op.scratch[1] + zeros + made);
                    meter.sub(op.scratch[1]);
                    wanted.iter().for_each(|&arg| self.accumulate(meter, &mut gradients, arg));
                    meter.sub(zeros + made);
                }
                Rule::Ready => {
                    meter.spike(op.scratch[1]);
                    wanted.iter().for_each(|&arg| self.accumulate(meter, &mut gradients, arg));
                    meter.release(op.saved);
                }
                Rule::Again(part) => {
                    if names {
                        meter.enter(&op.section);
                    }
                    let before = meter.weight_gradients;
                    part.backward(meter, incoming);
                    meter.inside += meter.weight_gradients - before;
                    wanted.iter().for_each(|&arg| self.accumulate(meter, &mut gradients, arg));
                    meter.sub(part.inputs_bytes());
                }
            }
            meter.sub(incoming);
        }
        gradients.into_keys().collect()
    }

    /// Zeros and a sum the first time, a sum afterwards; what was there before is released.
    fn accumulate(&self, meter: &mut Meter, gradients: &mut BTreeMap<Value, u64>, value: Value) {
        let Node { grad_bytes, is_weight, .. } = self.nodes[value.0];
        if gradients.insert(value, grad_bytes).is_none() {
            meter.add(grad_bytes);
            if is_weight {
                meter.weight_gradients += grad_bytes;
            }
        }
        meter.spike(grad_bytes);
    }

    /// Gives back what forward kept; the gradients that are ready were handed out.
    pub fn drop_graph(&self, meter: &mut Meter) {
        let handed: u64 = self
            .ops
            .iter()
            .filter(|op| matches!(op.rule, Rule::Ready) && self.is_tracked(op.out))
            .map(|op| op.saved)
            .sum();
        meter.release(self.kept() - handed);
    }
}

impl Part {
    fn inputs_bytes(&self) -> u64 {
        let inputs = &self.second.inputs[..self.inputs_count()];
        inputs.iter().map(|value| self.second.tape.nodes[value.0].grad_bytes).sum()
    }

    fn inputs_count(&self) -> usize {
        self.second.inputs.len() - self.first.as_ref().map_or(0, |first| first.outputs.len())
    }

    /// Outside of the graph; the result is copied into it.
    fn forward(&self, meter: &mut Meter) {
        let middle = self.first.as_ref().map_or(0, |first| {
            first.tape.forward_loose(meter, &first.outputs);
            first.tape.bytes_of(&first.outputs)
        });
        self.second.tape.forward_loose(meter, &self.second.outputs);
        let out = self.second.tape.bytes_of(&self.second.outputs);
        meter.spike(out);
        meter.sub(out + middle);
    }

    /// Leaves the gradients of the inputs held.
    fn backward(&self, meter: &mut Meter, incoming: u64) {
        let inputs = self.inputs_bytes();
        let middle = self.first.as_ref().map_or(0, |first| {
            first.tape.forward_loose(meter, &first.outputs);
            first.tape.bytes_of(&first.outputs)
        });
        // Leaves are copies, made one by one while the originals go.
        meter.add(inputs);
        self.second.pull(meter, incoming, inputs + middle);
        if let Some(first) = &self.first {
            // The gradients of what the first stage made are held until it has been pulled.
            meter.add(inputs);
            first.pull(meter, middle, inputs);
            meter.sub(middle);
            meter.spike(inputs);
            meter.sub(inputs);
        }
    }
}

impl Stage {
    /// Runs on leaves that are held, and backward from gradients that are held, `incoming` together, which others hold as
    /// well. Leaves are released, gradients of leaves stay.
    fn pull(&self, meter: &mut Meter, incoming: u64, leaves: u64) {
        self.tape.forward_kept(meter, false);
        meter.add(incoming);
        meter.spike(incoming);
        let reached = self.tape.backward(meter, &self.outputs, false);
        self.tape.drop_graph(meter);
        // A leaf without a gradient gets zeros.
        let missed: Vec<Value> = self.inputs.iter().copied().filter(|input| !reached.contains(input)).collect();
        meter.add(self.tape.bytes_of(&missed));
        meter.sub(leaves);
    }
}

#[cfg(test)]
mod tests;
