//! Errors of parsing and faults of running.

/// Why a module cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A statement that is no PTX, or an instruction that is not known.
    #[error("line {line}: {message}: `{text}`")]
    Syntax {
        /// Line of the module's text, from 1.
        line: u32,
        /// What is wrong.
        message: String,
        /// The line itself.
        text: String,
    },
}

impl Error {
    pub(crate) fn syntax(text: &str, line: u32, message: impl Into<String>) -> Self {
        Self::Syntax { line, message: message.into(), text: line_text(text, line) }
    }
}

/// One line of a text, from 1, without the blanks around it.
pub(crate) fn line_text(text: &str, line: u32) -> String {
    text.lines().nth(line.saturating_sub(1) as usize).unwrap_or("").trim().to_string()
}

/// Why a host-side access to emulated memory failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(pub(crate) String);

/// What a kernel did wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The launch itself cannot be made.
    #[error("launch of kernel {kernel}: {message}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// What was given and what is allowed.
        message: String,
    },
    /// An instruction failed.
    #[error("kernel {kernel}, CTA ({}, {}, {}), warp {warp}{}: line {line} `{text}`: {message}", cta[0], cta[1], cta[2], lane_text(*lane))]
    Instruction {
        /// The kernel's name.
        kernel: String,
        /// Index of the thread block, x y z.
        cta: [u32; 3],
        /// Index of the warp in its thread block.
        warp: u32,
        /// The lane, where one lane is to blame.
        lane: Option<u32>,
        /// Line of the module's text, from 1.
        line: u32,
        /// The line itself.
        text: String,
        /// What happened.
        message: String,
    },
}

impl Fault {
    /// What happened, without the place.
    pub fn message(&self) -> &str {
        match self {
            Self::Launch { message, .. } | Self::Instruction { message, .. } => message,
        }
    }
}

fn lane_text(lane: Option<u32>) -> String {
    lane.map(|l| format!(", lane {l}")).unwrap_or_default()
}

/// What an instruction did wrong; the scheduler adds the place.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub lane: Option<u32>,
    pub message: String,
}

impl Trouble {
    pub fn new(message: impl Into<String>) -> Self {
        Self { lane: None, message: message.into() }
    }

    pub fn at(lane: usize, message: impl Into<String>) -> Self {
        Self { lane: Some(lane as u32), message: message.into() }
    }
}
