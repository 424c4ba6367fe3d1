//! What ranks send and how long they wait for each other.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::{CommStats, Traffic};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Result;

/// Exchange between ranks over some time; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct CommUse {
    /// Bytes sent, over all ranks and all kinds of traffic.
    pub bytes_sent: u64,
    /// Seconds that a rank waited for its peers, on average.
    pub waited_s: f64,
    /// Seconds that the rank which waited longest did.
    pub waited_max_s: f64,
    /// The same by kind of traffic. Lines of `metrics.jsonl` from before there was such a field have none.
    #[serde(default)]
    pub operations: Operations,
}

/// Exchange of one kind over some time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct OperationUse {
    /// Bytes sent, over all ranks.
    pub bytes_sent: u64,
    /// Seconds that a rank waited for its peers, on average.
    pub waited_s: f64,
    /// Seconds that the rank which waited longest for this kind did; not the same rank for every kind.
    pub waited_max_s: f64,
}

/// Exchange by kind of traffic: as JSON an object with the kinds that there were, by [`Traffic::name`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Operations([OperationUse; Traffic::ALL.len()]);

impl Operations {
    /// Exchange of one kind; zeros if there was none.
    pub fn of(&self, traffic: Traffic) -> OperationUse {
        self.0[traffic.index()]
    }

    /// The kinds that there were, in the order of [`Traffic::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Traffic, OperationUse)> {
        let all = Traffic::ALL.into_iter().zip(self.0);
        all.filter(|(_, used)| *used != OperationUse::default())
    }
}

impl FromIterator<(Traffic, OperationUse)> for Operations {
    fn from_iter<I: IntoIterator<Item = (Traffic, OperationUse)>>(kinds: I) -> Self {
        let mut operations = Self::default();
        kinds.into_iter().for_each(|(traffic, used)| operations.0[traffic.index()] = used);
        operations
    }
}

impl Serialize for Operations {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(traffic, used)| (traffic.name(), used)))
    }
}

impl<'de> Deserialize<'de> for Operations {
    /// Kinds that are not known are passed over, as unknown fields of a line are.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let by_name = BTreeMap::<String, OperationUse>::deserialize(deserializer)?;
        Ok(Traffic::ALL.into_iter().filter_map(|kind| Some((kind, *by_name.get(kind.name())?))).collect())
    }
}

/// Measures from its start on.
#[derive(Debug)]
pub struct CommMeter {
    before: CommStats,
}

impl CommMeter {
    /// Starts to measure one rank.
    pub fn start(comm: &dyn Communicator) -> Self {
        Self { before: comm.stats() }
    }

    /// What all ranks did since their starts. Every rank has to call it: some numbers of each are gathered, which are not
    /// counted.
    ///
    /// # Errors
    /// The exchange with another rank failed.
    pub fn read(&self, comm: &dyn Communicator) -> Result<CommUse> {
        let now = comm.stats();
        // Bytes, then seconds, by kind; the bytes are whole numbers below 2^53.
        let bytes = Traffic::ALL.map(|kind| (now.of(kind).bytes_sent - self.before.of(kind).bytes_sent) as f64);
        let waited = Traffic::ALL.map(|kind| (now.of(kind).waited - self.before.of(kind).waited).as_secs_f64());
        let ranks = comm.all_gather(&Tensor::new(&[bytes, waited], &Device::Cpu)?)?;
        let ranks = ranks.iter().map(Tensor::to_vec2::<f64>).collect::<candle_core::Result<Vec<_>>>()?;
        let operations = Traffic::ALL.into_iter().map(|kind| {
            let of_kind = |numbers: &[Vec<f64>]| (numbers[0][kind.index()], numbers[1][kind.index()]);
            (kind, over_ranks(ranks.iter().map(|numbers| of_kind(numbers))))
        });
        let operations = operations.collect();
        let all_kinds = |numbers: &[Vec<f64>]| (numbers[0].iter().sum(), numbers[1].iter().sum());
        let OperationUse { bytes_sent, waited_s, waited_max_s } =
            over_ranks(ranks.iter().map(|numbers| all_kinds(numbers)));
        Ok(CommUse { bytes_sent, waited_s, waited_max_s, operations })
    }
}

/// From the bytes and seconds of each rank.
fn over_ranks(ranks: impl ExactSizeIterator<Item = (f64, f64)>) -> OperationUse {
    let size = ranks.len() as f64;
    let (mut bytes, mut waited, mut most) = (0.0, 0.0, 0f64);
    for (sent, seconds) in ranks {
        (bytes, waited, most) = (bytes + sent, waited + seconds, most.max(seconds));
    }
    OperationUse { bytes_sent: bytes as u64, waited_s: waited / size, waited_max_s: most }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_cp::comm::{Local, threads};

    #[test]
    fn every_rank_reads_the_sums_since_the_start() {
        let ranks = threads::run(3, &threads::Options::default(), |comm| {
            let comm = comm.as_ref();
            let x = Tensor::zeros(5, candle_core::DType::F32, &Device::Cpu)?;
            comm.all_gather(&x)?;
            let meter = CommMeter::start(comm);
            let none = meter.read(comm)?;
            let meter = CommMeter::start(comm);
            comm.all_gather(&x)?;
            comm.broadcast(&x, 1)?;
            let since = |kind| (comm.stats().of(kind).waited - meter.before.of(kind).waited).as_secs_f64();
            let waited = [since(Traffic::Gather), since(Traffic::Broadcast)];
            Ok::<_, crate::Error>((none, meter.read(comm)?, waited))
        });
        let ranks = ranks.unwrap();
        let close = |a: f64, b: f64| (a - b).abs() < 1e-8;
        let check = |found: OperationUse, bytes: u64, waits: &[f64]| {
            assert_eq!(found.bytes_sent, bytes);
            assert!(close(found.waited_s, waits.iter().sum::<f64>() / 3.0), "{found:?}, {waits:?}");
            assert!(close(found.waited_max_s, waits.iter().copied().fold(0.0, f64::max)), "{found:?}, {waits:?}");
            assert!(0.0 < found.waited_s && found.waited_s <= found.waited_max_s, "{found:?}");
        };
        for (none, some, _) in &ranks {
            assert_eq!(*none, CommUse::default());
            let CommUse { bytes_sent, waited_s, waited_max_s, operations } = *some;
            let of_ranks = |waited: fn(&[f64; 2]) -> f64| ranks.iter().map(|(_, _, w)| waited(w)).collect::<Vec<_>>();
            check(OperationUse { bytes_sent, waited_s, waited_max_s }, 160, &of_ranks(|w| w[0] + w[1]));
            // 5 numbers of 4 bytes: from each to 2 others, and from one to 2 others.
            check(operations.of(Traffic::Gather), 120, &of_ranks(|w| w[0]));
            check(operations.of(Traffic::Broadcast), 40, &of_ranks(|w| w[1]));
            let kinds: Vec<Traffic> = operations.iter().map(|(kind, _)| kind).collect();
            assert_eq!(kinds, [Traffic::Gather, Traffic::Broadcast]);
        }
        let alone = Local::new();
        assert_eq!(CommMeter::start(&alone).read(&alone).unwrap(), CommUse::default());
    }

    #[test]
    fn kinds_go_by_name_and_may_be_absent() {
        let used = OperationUse { bytes_sent: 8, waited_s: 0.25, waited_max_s: 0.5 };
        let waited_only = OperationUse { bytes_sent: 0, ..used };
        let operations = [(Traffic::Barrier, waited_only), (Traffic::KeyValueGradient, used)].into_iter().collect();
        let all = CommUse { bytes_sent: 8, waited_s: 0.5, waited_max_s: 1.0, operations };
        let json = concat!(
            r#"{"bytes_sent":8,"waited_s":0.5,"waited_max_s":1.0,"operations":{"#,
            r#""key_value_gradient":{"bytes_sent":8,"waited_s":0.25,"waited_max_s":0.5},"#,
            r#""barrier":{"bytes_sent":0,"waited_s":0.25,"waited_max_s":0.5}}}"#
        );
        assert_eq!(serde_json::to_string(&all).unwrap(), json);
        assert_eq!(serde_json::from_str::<CommUse>(json).unwrap(), all);
        let newer = json.replace("\"barrier\"", "\"teleport\"");
        let found = serde_json::from_str::<CommUse>(&newer).unwrap().operations;
        assert_eq!(found.iter().collect::<Vec<_>>(), [(Traffic::KeyValueGradient, used)]);
        let older = serde_json::from_str(r#"{"bytes_sent":8,"waited_s":0.5,"waited_max_s":1.0}"#).unwrap();
        assert_eq!(CommUse { operations: Operations::default(), ..all }, older);
        assert!(serde_json::from_str::<CommUse>(&json.replace(":0,", ":-1,")).is_err());
    }
}
