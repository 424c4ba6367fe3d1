//! Learning rate by step: linear warm-up, then down to a floor or level.

use std::f64::consts::PI;
use std::fmt;

/// How the learning rate goes on after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleKind {
    /// Half a cosine down to the floor.
    Cosine,
    /// A straight line down to the floor.
    Linear,
    /// Stays at the peak.
    Constant,
}

impl ScheduleKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Cosine, Self::Linear, Self::Constant];
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Constant => "constant",
        })
    }
}

/// The shape of the curve; the rate is a pure function of the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The way down.
    pub kind: ScheduleKind,
    /// Highest learning rate, reached at step `warmup`.
    pub peak: f64,
    /// Steps of the linear rise; 0 starts at the peak.
    pub warmup: usize,
    /// Steps in total; the floor is reached at this one and kept afterwards.
    pub steps: usize,
    /// Lowest rate after the warm-up, as a share of the peak, 0 to 1; not for a constant one.
    pub floor: f64,
}

impl Schedule {
    /// Learning rate of `step`, counted from 1.
    ///
    /// ```
    /// use candle_finetune::{Schedule, ScheduleKind};
    /// let schedule = Schedule { kind: ScheduleKind::Cosine, peak: 1.0, warmup: 4, steps: 10, floor: 0.1 };
    /// assert_eq!(schedule.rate(1), 0.25);
    /// assert_eq!(schedule.rate(4), 1.0);
    /// assert!((schedule.rate(7) - 0.55).abs() < 1e-12);
    /// assert!((schedule.rate(10) - 0.1).abs() < 1e-12);
    /// ```
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let falling = self.steps.saturating_sub(self.warmup);
        let done = match falling {
            0 => 1.0,
            _ => ((step - self.warmup) as f64 / falling as f64).min(1.0),
        };
        let left = match self.kind {
            ScheduleKind::Cosine => 0.5 * (1.0 + (PI * done).cos()),
            ScheduleKind::Linear => 1.0 - done,
            ScheduleKind::Constant => return self.peak,
        };
        self.peak * (self.floor + (1.0 - self.floor) * left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_the_floor_and_stays() {
        let schedule = Schedule { kind: ScheduleKind::Cosine, peak: 2.0, warmup: 10, steps: 110, floor: 0.1 };
        let rates: Vec<f64> = (1..=200).map(|step| schedule.rate(step)).collect();
        assert!((rates[0] - 0.2).abs() < 1e-12);
        assert!((rates[9] - 2.0).abs() < 1e-12);
        assert!((rates[59] - 1.1).abs() < 1e-12, "half way the mean of peak and floor");
        assert!((rates[109] - 0.2).abs() < 1e-12);
        assert_eq!(rates[199], rates[109]);
        assert!(rates[..10].is_sorted());
        assert!(rates[9..].iter().rev().is_sorted());
    }

    #[test]
    fn edge_cases_are_finite() {
        let no_warmup = Schedule { kind: ScheduleKind::Cosine, peak: 1.0, warmup: 0, steps: 5, floor: 0.0 };
        assert!((no_warmup.rate(1) - 0.9045084971874737).abs() < 1e-12, "half of 1 + cos(pi / 5)");
        // A run shorter than its warm-up never reaches the peak.
        assert_eq!(Schedule { warmup: 10, steps: 2, ..no_warmup }.rate(2), 0.2);
        assert_eq!(Schedule { warmup: 3, steps: 3, floor: 0.5, ..no_warmup }.rate(3), 0.5);
    }

    #[test]
    fn a_line_and_a_level() {
        let line = Schedule { kind: ScheduleKind::Linear, peak: 2.0, warmup: 10, steps: 110, floor: 0.1 };
        assert!((line.rate(60) - 1.1).abs() < 1e-12);
        assert!((line.rate(35) - (0.2 + 1.8 * 0.75)).abs() < 1e-12);
        assert!((line.rate(110) - 0.2).abs() < 1e-12);
        let level = Schedule { kind: ScheduleKind::Constant, ..line };
        assert_eq!([level.rate(5), level.rate(10), level.rate(110), level.rate(500)], [1.0, 2.0, 2.0, 2.0]);
    }
}
