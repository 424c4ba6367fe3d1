//! Memory of this process, as the system tells it.

use serde::{Deserialize, Serialize};

/// Memory of this process, that of all rank threads together; `None` where the system has no `/proc/self/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Resident bytes now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The most resident bytes since the process began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
}

impl Memory {
    /// What this process has now.
    pub fn now() -> Self {
        std::fs::read_to_string("/proc/self/status").map(|status| Self::parse(&status)).unwrap_or_default()
    }

    fn parse(status: &str) -> Self {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Self { memory_bytes: field("VmRSS:"), peak_memory_bytes: field("VmHWM:") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_and_peak_are_read_by_name() {
        let status = "Name:\tfinetune\nVmPeak:\t 9000 kB\nVmHWM:\t  2048 kB\nVmRSS:\t     3 kB\nThreads:\t4\n";
        assert_eq!(Memory::parse(status), Memory { memory_bytes: Some(3072), peak_memory_bytes: Some(2048 * 1024) });
        for odd in ["", "VmRSS:\tmany kB\n", "VmRSS:\t5 MB\n", "VmHWM:\t18446744073709551615 kB\n"] {
            assert_eq!(Memory::parse(odd), Memory::default(), "{odd:?}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_in_use_counts() {
        let held = vec![1u8; 64 << 20];
        let Memory { memory_bytes: Some(now), peak_memory_bytes: Some(peak) } = Memory::now() else {
            panic!("Linux tells both");
        };
        assert!(std::hint::black_box(&held).len() as u64 <= now && now <= peak, "{now} and {peak} bytes");
    }
}
