//! What every rank sends and receives in a step, from the plans that the ranks themselves make.

use std::collections::BTreeMap;

use candle_cp::comm::{Traffic, share};
use candle_cp::{KeyCounts, MaskRule, SequenceLayout, Tokens, Trim, halo_exchange, state_exchange};

use crate::error::Result;
use crate::family::{AttentionShape, DecoderShape, KeyRole, Mixer};

/// Bytes of a number of sums.
const WIDE: u64 = 4;

/// Traffic of one kind on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flow {
    /// Messages sent.
    pub messages: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// The most bytes in messages at a time: received and being worked on, or sent and not yet taken.
    pub peak: u64,
}

impl Flow {
    /// One after the other.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            messages: self.messages + other.messages,
            sent: self.sent + other.sent,
            received: self.received + other.received,
            peak: self.peak.max(other.peak),
        }
    }

    fn times(self, count: u64) -> Self {
        let peak = if count == 0 { 0 } else { self.peak };
        Self { messages: self.messages * count, sent: self.sent * count, received: self.received * count, peak }
    }
}

/// Traffic of one rank by kind.
pub type RankTraffic = BTreeMap<Traffic, Flow>;

/// Keys (or other rows) sent and received at each hop.
type Hops = [[usize; 2]];

/// How the numbers of a batch are made and sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    /// Bytes of a number of the model.
    pub number: u64,
    pub batch: u64,
    pub recompute: bool,
}

/// A batch over ranks.
#[derive(Debug, Clone)]
pub(super) struct Sharing {
    pub layout: SequenceLayout,
    pub tokens: Tokens,
    pub plans: BTreeMap<MaskRule, KeyCounts>,
}

impl Sharing {
    pub fn new(shape: &DecoderShape, layout: SequenceLayout, tokens: Tokens) -> Result<Self> {
        let mut plans = BTreeMap::new();
        for layer in &shape.layers {
            if let Mixer::Attention(AttentionShape { rule, .. }) = &layer.mixer
                && !plans.contains_key(rule)
            {
                plans.insert(*rule, KeyCounts::new(&layout, &tokens, rule, Trim::Live)?);
            }
        }
        Ok(Self { layout, tokens, plans })
    }
}

/// Traffic of the decoder over one batch.
#[derive(Debug, Clone)]
pub(super) struct DecoderTraffic {
    /// `[layer][rank]`, forward and backward.
    pub layers: Vec<Vec<[RankTraffic; 2]>>,
}

impl DecoderTraffic {
    pub fn new(shape: &DecoderShape, sharing: &Sharing, sending: Sending) -> Self {
        let Sharing { layout, tokens, plans } = sharing;
        // Most layers are like others: each kind is worked out once.
        let mut known: Vec<(&Mixer, Vec<[RankTraffic; 2]>)> = Vec::new();
        let mut layers = Vec::with_capacity(shape.layers.len());
        for layer in &shape.layers {
            if let Some((_, traffic)) = known.iter().find(|(mixer, _)| **mixer == layer.mixer) {
                layers.push(traffic.clone());
                continue;
            }
            let traffic = match &layer.mixer {
                Mixer::Attention(attention) => attention_traffic(attention, &plans[&attention.rule], sending),
                Mixer::Delta { heads, taps } => delta_traffic(heads, *taps, (layout, tokens), sending),
            };
            known.push((&layer.mixer, traffic.clone()));
            layers.push(traffic);
        }
        Self { layers }
    }

    /// All of a rank's, over `batches`.
    pub fn of_rank(&self, rank: usize, batches: u64) -> RankTraffic {
        let passes = self.layers.iter().flat_map(|layer| &layer[rank]);
        let mut sum = RankTraffic::new();
        for (kind, flow) in passes.flatten() {
            let entry = sum.entry(*kind).or_default();
            *entry = entry.and(flow.times(batches));
        }
        sum
    }
}

fn attention_traffic(attention: &AttentionShape, plan: &KeyCounts, sending: Sending) -> Vec<[RankTraffic; 2]> {
    let per_key = 2 * sending.batch * (attention.key_heads * attention.head_dim) as u64;
    let of_rank = |hops: &Vec<[usize; 2]>| {
        let keys = ring(hops, per_key * sending.number);
        match attention.keys {
            KeyRole::Reads => [RankTraffic::new(), RankTraffic::new()],
            // Gathered once outside of what runs again; gradients travel in the type of the keys.
            KeyRole::Lends => {
                let home = gathered_home(hops, per_key * sending.number);
                [RankTraffic::from([(Traffic::KeyValue, keys)]), RankTraffic::from([(Traffic::KeyValueGradient, home)])]
            }
            KeyRole::Own => {
                let again = keys.times(if sending.recompute { 2 } else { 1 });
                let home = ring_home(hops, per_key * WIDE.max(sending.number));
                let backward = RankTraffic::from([(Traffic::KeyValue, again), (Traffic::KeyValueGradient, home)]);
                [RankTraffic::from([(Traffic::KeyValue, keys)]), backward]
            }
        }
    };
    plan.hops.iter().map(of_rank).collect()
}

/// The way back.
fn turned(hops: &Hops) -> Vec<[usize; 2]> {
    hops.iter().map(|&[sent, received]| [received, sent]).collect()
}

/// Keys around the ring: while a chunk is worked on, the next one is on its way.
fn ring(hops: &Hops, per_key: u64) -> Flow {
    let mut flow = Flow::default();
    for (place, &[sent, received]) in hops.iter().enumerate() {
        flow.messages += u64::from(sent > 0);
        flow.sent += sent as u64 * per_key;
        flow.received += received as u64 * per_key;
        let next = hops.get(place + 1).map_or(0, |[sent, _]| *sent);
        flow.peak = flow.peak.max((received + sent.max(next)) as u64 * per_key);
    }
    flow
}

/// Gradients go home one hop at a time.
fn ring_home(hops: &Hops, per_key: u64) -> Flow {
    let back = turned(hops);
    let peak = back.iter().map(|[sent, received]| sent + received).max().unwrap_or(0);
    Flow { peak: peak as u64 * per_key, ..ring(&back, per_key) }
}

/// Gradients of gathered keys: one hop is sent before the one ahead of it has arrived.
fn gathered_home(hops: &Hops, per_key: u64) -> Flow {
    let back = turned(hops);
    let with_next = |(place, &[sent, received]): (usize, &[usize; 2])| {
        sent + received + back.get(place + 1).map_or(0, |[next, _]| *next)
    };
    let peak = back.iter().enumerate().map(with_next).max().unwrap_or(0);
    Flow { peak: peak as u64 * per_key, ..ring(&back, per_key) }
}

fn delta_traffic(
    heads: &candle_cp::DeltaHeads,
    taps: usize,
    (layout, tokens): (&SequenceLayout, &Tokens),
    sending: Sending,
) -> Vec<[RankTraffic; 2]> {
    let states = state_exchange(layout, tokens, heads);
    let channels = heads.width() as u64;
    let wide = WIDE.max(sending.number);
    let again = |times: u64| if sending.recompute { times } else { 0 };
    let of_rank = |rank: usize| {
        let rows = halo_exchange(layout, tokens, rank, taps);
        let halo = all_at_once(&rows, channels * sending.number);
        let mut forward = RankTraffic::from([(Traffic::Halo, halo)]);
        // The convolution sits in the stage that runs twice more.
        let mut backward = RankTraffic::from([
            (Traffic::Halo, halo.times(again(2))),
            (Traffic::HaloGradient, all_at_once(&turned(&rows), channels * wide)),
        ]);
        if let Some(exchange) = &states {
            let [states, gradients] = [&exchange.states, &exchange.gradients].map(|made| gather(made, rank, wide));
            forward.insert(Traffic::State, states);
            backward.insert(Traffic::State, states.times(again(1)));
            backward.insert(Traffic::StateGradient, gradients);
        }
        [forward, backward]
    };
    (0..layout.ranks()).map(of_rank).collect()
}

/// All hops are posted before the first is waited for.
fn all_at_once(rows: &Hops, per_row: u64) -> Flow {
    let mut flow = ring(rows, per_row);
    let mut unsent: usize = rows.iter().map(|[sent, _]| sent).sum();
    flow.peak = 0;
    for [sent, received] in rows {
        flow.peak = flow.peak.max((unsent + received) as u64 * per_row);
        unsent -= sent;
    }
    flow
}

/// Every rank hands what it made to all others, `numbers[rank]` of so many bytes.
fn gather(numbers: &[usize], rank: usize, bytes: u64) -> Flow {
    let (ranks, own) = (numbers.len() as u64, numbers[rank] as u64 * bytes);
    let from = |step: u64| numbers[((rank as u64 + ranks - step) % ranks) as usize] as u64 * bytes;
    let received = (1..ranks).map(from).sum();
    let peak = (1..ranks).map(|step| (ranks - step) * own + from(step)).max().unwrap_or(0);
    Flow { messages: ranks - 1, sent: (ranks - 1) * own, received, peak }
}

/// The sum of one bucket of `count` numbers over `ranks`: each rank's share goes to it, it adds up, and then hands what
/// comes of it to all others, in numbers of `handed` bytes. An empty share is a message as well. Peaks are not planned.
pub(super) fn reduction(count: usize, ranks: usize, rank: usize, [reduced, handed]: [u64; 2]) -> [Flow; 2] {
    let (own, others) = (share(count, ranks, rank).len() as u64, ranks as u64 - 1);
    let rest = count as u64 - own;
    [
        Flow { messages: others, sent: rest * reduced, received: others * own * reduced, peak: 0 },
        Flow { messages: others, sent: others * own * handed, received: rest * handed, peak: 0 },
    ]
}
