//! What ranks send and how long they wait for each other.

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::CommStats;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Exchange between ranks over some time, all kinds of traffic; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct CommUse {
    /// Bytes sent, over all ranks.
    pub bytes_sent: u64,
    /// Seconds that a rank waited for its peers, on average.
    pub waited_s: f64,
    /// Seconds that the rank which waited longest did.
    pub waited_max_s: f64,
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

    /// What all ranks did since their starts. Every rank has to call it: two numbers of each are gathered, which are not
    /// counted.
    ///
    /// # Errors
    /// The exchange with another rank failed.
    pub fn read(&self, comm: &dyn Communicator) -> Result<CommUse> {
        let now = comm.stats();
        let bytes_sent = (now.bytes_sent() - self.before.bytes_sent()) as f64;
        let waited = (now.waited() - self.before.waited()).as_secs_f64();
        let ranks = comm.all_gather(&Tensor::new(&[bytes_sent, waited], &Device::Cpu)?)?;
        let ranks = ranks.iter().map(Tensor::to_vec1::<f64>).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(CommUse {
            // Whole numbers below 2^53.
            bytes_sent: ranks.iter().map(|rank| rank[0]).sum::<f64>() as u64,
            waited_s: ranks.iter().map(|rank| rank[1]).sum::<f64>() / ranks.len() as f64,
            waited_max_s: ranks.iter().map(|rank| rank[1]).fold(0.0, f64::max),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_cp::comm::{Local, threads};

    #[test]
    fn every_rank_reads_the_sum_since_the_start() {
        let ranks = threads::run(3, &threads::Options::default(), |comm| {
            let comm = comm.as_ref();
            let x = Tensor::zeros(5, candle_core::DType::F32, &Device::Cpu)?;
            comm.all_gather(&x)?;
            let meter = CommMeter::start(comm);
            let none = meter.read(comm)?;
            let meter = CommMeter::start(comm);
            comm.all_gather(&x)?;
            let waited = comm.stats().waited().as_secs_f64() - meter.before.waited().as_secs_f64();
            Ok::<_, crate::Error>((none, meter.read(comm)?, waited))
        });
        let ranks = ranks.unwrap();
        let waits: Vec<f64> = ranks.iter().map(|(_, _, waited)| *waited).collect();
        for (none, some, _) in &ranks {
            assert_eq!(*none, CommUse::default());
            assert_eq!(some.bytes_sent, 3 * 2 * 5 * 4, "each sends 5 numbers of 4 bytes to 2 others");
            let close = |a: f64, b: f64| (a - b).abs() < 1e-8;
            assert!(close(some.waited_s, waits.iter().sum::<f64>() / 3.0), "{some:?}, {waits:?}");
            assert!(close(some.waited_max_s, waits.iter().copied().fold(0.0, f64::max)), "{some:?}, {waits:?}");
            assert!(0.0 < some.waited_s && some.waited_s <= some.waited_max_s, "{some:?}");
        }
        let alone = Local::new();
        assert_eq!(CommMeter::start(&alone).read(&alone).unwrap(), CommUse::default());
    }
}
