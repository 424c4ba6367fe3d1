//! The table of a model's tensors: name in a checkpoint, shape, and what each is.

/// Name of the configuration file in a checkpoint folder.
pub const CONFIG_FILE: &str = "config.json";

/// Name of the head's matrix, where it is not the embedding table.
pub const LM_HEAD: &str = "lm_head.weight";

/// What weight files and adapters need to know about a model.
pub trait ModelConfig {
    /// Every tensor that a checkpoint with this configuration has or may have, in no particular order.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// The text of `config.json` that it was made from, unchanged.
    fn to_json(&self) -> String;

    /// How names of tensors begin that are no part of the model, such as those of a head for another purpose. Those that
    /// a checkpoint has, and that [`ModelConfig::tensors`] does not list, are kept as with [`Role::Unused`].
    fn unread_prefixes(&self) -> &'static [&'static str] {
        &[]
    }

    /// The path in transformers' model of the module that holds a tensor, from its name in a checkpoint without
    /// `.weight`. Most models need nothing but this default: the name.
    fn module_path(&self, name: &str) -> String {
        name.to_string()
    }
}

/// What a tensor is: decides whether it is trained and how a fresh one is filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Role {
    /// A matrix or a table; `fan_in` is the length of the sums it takes part in, `range` the configuration's
    /// `initializer_range`. Trained.
    Matrix {
        /// Number of inputs of a row; for a table, the width of an entry.
        fan_in: usize,
        /// Least standard deviation of fresh values.
        range: f64,
    },
    /// The bias of a projection, or a vector that starts at 0 like one. Trained.
    Bias,
    /// The weight of a norm. Trained.
    Norm,
    /// The weight of the norm over a query or key head. Trained.
    HeadNorm,
    /// A vector whose fresh entries are logarithms of numbers that lie evenly between `low` and `high`. Trained.
    LogUniform {
        /// Smallest number, above 0.
        low: f64,
        /// Largest number.
        high: f64,
    },
    /// A constant: kept, saved, not trained. Fresh ones hold `fresh` everywhere.
    Buffer {
        /// Value of a fresh one.
        fresh: f64,
    },
    /// A tensor that released files have and the model does not read. May be absent; if present it is kept in the
    /// file's bytes and saved, whatever its shape. Fresh weights have none.
    Unused,
}

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape; matrices are `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// What it is.
    pub role: Role,
}

impl TensorSpec {
    /// Whether training changes it.
    pub fn is_trained(&self) -> bool {
        !matches!(self.role, Role::Buffer { .. } | Role::Unused)
    }
}

/// A table in the making.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// What there is so far.
    pub specs: Vec<TensorSpec>,
    /// The configuration's `initializer_range` for what comes next.
    pub range: f64,
}

impl Table {
    /// An empty one.
    pub fn new(range: f64) -> Self {
        Self { specs: Vec::new(), range }
    }

    /// Adds a tensor.
    pub fn push(&mut self, name: impl Into<String>, shape: &[usize], role: Role) {
        self.specs.push(TensorSpec { name: name.into(), shape: shape.to_vec(), role });
    }

    /// Adds a matrix or table, whose last dimension is the number of inputs.
    pub fn matrix(&mut self, name: impl Into<String>, shape: &[usize]) {
        let fan_in = shape[shape.len() - 1];
        self.push(name, shape, Role::Matrix { fan_in, range: self.range });
    }
}
