//! What the ranks of a job are told to do, as a file that all of them read.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file in a job's folder.
const FILE: &str = "order.json";

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Order {
    /// Flags of all ranks, and their values.
    pub flags: Vec<(String, String)>,
    /// Those of one rank, over the others.
    pub only: Vec<(usize, String, String)>,
    /// Goes on with an earlier run.
    pub resume: bool,
    pub strike: Option<Strike>,
    /// Milliseconds that rank 0 rests after each step.
    pub rest: u64,
}

/// One rank comes to harm.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Strike {
    pub rank: usize,
    /// Steps that are done by then.
    pub after: usize,
    pub moment: Moment,
    pub harm: Harm,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Moment {
    /// Before the exchange with this number, from 1, of a kind that `Traffic::name` names.
    Exchange(String, usize),
    /// Once the last one of these steps is done.
    Observed,
    /// While there is a folder that rank 0 writes a checkpoint into.
    Writing(PathBuf),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Harm {
    Killed,
    Stopped,
    Loses(PathBuf),
}

impl Order {
    pub fn write(&self, folder: &Path) -> Result<(), String> {
        let text = serde_json::to_string(self).map_err(|e| e.to_string())?;
        std::fs::write(folder.join(FILE), text).map_err(|e| e.to_string())
    }

    pub fn read(folder: &Path) -> Self {
        let text = std::fs::read_to_string(folder.join(FILE)).expect("the job's folder has its order");
        serde_json::from_str(&text).expect("an order")
    }
}
