//! The error types of this crate.

use std::path::PathBuf;

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, from reading a checkpoint's processor files to encoding a sample.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the checkpoint could not be read.
    #[error("cannot read {}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason the system gave.
        cause: std::io::Error,
    },

    /// A checkpoint folder lacks a file.
    #[error("{} has no {}; {fix}", folder.display(), files.join(", no "))]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// The files looked for; one of them is enough.
        files: Vec<&'static str>,
        /// What to do.
        fix: &'static str,
    },

    /// A JSON text could not be parsed.
    #[error("{what} is not valid: {cause}")]
    Json {
        /// The file, or what the text stands for.
        what: String,
        /// Line, column and reason.
        cause: serde_json::Error,
    },

    /// A setting of the processor files has a value that this crate cannot follow.
    #[error("{file}: {field} is {value}: {reason}")]
    Setting {
        /// The file it was read from.
        file: String,
        /// Full name of the field, such as `image_processor.patch_size`.
        field: String,
        /// The value found, as JSON.
        value: String,
        /// What is allowed instead.
        reason: String,
    },

    /// The chat template could not be compiled, or failed while rendering (its own `raise_exception` among that).
    #[error("chat template {name}: {reason}")]
    Template {
        /// File or name of the template.
        name: String,
        /// Line and reason.
        reason: String,
    },

    /// `tokenizer.json` could not be used, or the text could not be encoded.
    #[error("{what}: {reason}")]
    Tokenizer {
        /// The file, or what was encoded.
        what: String,
        /// The reason that the tokenizer gave.
        reason: String,
    },

    /// A token that the processor needs is not named, or is not one token of the vocabulary.
    #[error("{field} {}: {reason}", token.as_deref().map_or_else(|| "is not set".into(), |t| format!("is {t:?}")))]
    SpecialToken {
        /// The field of `tokenizer_config.json`, such as `image_token`.
        field: &'static str,
        /// Its value, if any.
        token: Option<String>,
        /// What is wrong and how to fix it.
        reason: &'static str,
    },

    /// The places of what the assistant wrote cannot be told from a rendered chat.
    #[error("what the assistant wrote cannot be told from the rendered chat: {reason}")]
    Answers {
        /// What is in the way.
        reason: String,
    },

    /// A message does not have the form of a chat message.
    #[error("messages[{index}]: {reason}")]
    Message {
        /// Place in the list, from 0.
        index: usize,
        /// What was found and what is allowed.
        reason: String,
    },

    /// A picture cannot be used.
    #[error("picture {index} ({name}): {fault}")]
    Picture {
        /// Place among the pictures of the sample, from 1.
        index: usize,
        /// Path, or a description of the source.
        name: String,
        /// What is wrong with it.
        fault: PictureFault,
    },

    /// The messages have another number of image parts without a source than pictures were handed over.
    #[error(
        "{parts} image part(s) without a source of their own, but {pictures} picture(s) in the list `images`; \
         give one picture per part"
    )]
    PictureList {
        /// Image parts without a source.
        parts: usize,
        /// Pictures in the list.
        pictures: usize,
    },

    /// The rendered text has another number of placeholders than there are pictures.
    #[error(
        "the rendered chat has {placeholders} placeholder(s) {token}, but there are {pictures} picture(s); \
         each picture needs an image part that the chat template writes out, and text must not contain {token}"
    )]
    PlaceholderCount {
        /// Placeholders in the rendered text.
        placeholders: usize,
        /// Pictures of the sample.
        pictures: usize,
        /// The placeholder.
        token: String,
    },

    /// The soft tokens of a picture end behind the longest sequence allowed.
    #[error(
        "picture {index} ({name}) takes {soft_tokens} soft tokens and ends at token {end}, but the sequence may have \
         {max_tokens}; the whole sample has {total}: raise the limit, drop a picture, or lower what the \
         processor's files allow for one (max_soft_tokens, size.longest_edge)"
    )]
    PictureTooLong {
        /// Place among the pictures of the sample, from 1.
        index: usize,
        /// Path, or a description of the source.
        name: String,
        /// Soft tokens of this picture.
        soft_tokens: usize,
        /// Tokens up to the end of this picture, its closing token among them.
        end: usize,
        /// The limit.
        max_tokens: usize,
        /// Tokens of the sample.
        total: usize,
    },

    /// The sample has more tokens than allowed, after its last picture.
    #[error("{total} tokens, but the sequence may have {max_tokens}: raise the limit or shorten the text")]
    TooLong {
        /// Tokens of the sample.
        total: usize,
        /// The limit.
        max_tokens: usize,
    },

    /// A grid of patches that no picture can have.
    #[error("picture {index} has {} x {} x {} patches (time x height x width): {reason}", grid[0], grid[1], grid[2])]
    Grid {
        /// Place among the pictures, from 1.
        index: usize,
        /// Patches along time, height and width.
        grid: [usize; 3],
        /// What is allowed.
        reason: String,
    },

    /// A run of image tokens has another length than its picture needs.
    #[error(
        "the image tokens {} to {} are {}, but picture {index} takes {expected}; every picture needs a run of its own: \
         put a token between two pictures, and give their grids in order",
        run.start, run.end - 1, run.len()
    )]
    ImageRun {
        /// Place among the pictures, from 1.
        index: usize,
        /// Its tokens in the row.
        run: std::ops::Range<usize>,
        /// Tokens that its grid asks for.
        expected: usize,
    },

    /// A row has another number of runs of image tokens than there are pictures.
    #[error(
        "{runs} run(s) of image tokens, but {grids} picture(s); give the grids of this row's pictures, and put a token \
         between two pictures"
    )]
    ImageRuns {
        /// Runs of image tokens.
        runs: usize,
        /// Grids given.
        grids: usize,
    },

    /// Token types and documents of a row do not fit together, or positions cannot be told for them.
    #[error("positions cannot be told: {reason}")]
    Row {
        /// What was found and what is allowed.
        reason: String,
    },

    /// Something is wrong with a sample; its name is put before the reason.
    #[error("{sample}: {cause}")]
    Sample {
        /// The name given with the request, such as `train.jsonl line 7`.
        sample: String,
        /// The reason.
        cause: Box<Error>,
    },
}

/// Why a picture cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PictureFault {
    /// The file could not be read.
    #[error("cannot read the file: {0}")]
    Io(#[from] std::io::Error),

    /// A web address; nothing is fetched from the network.
    #[error("is a web address, and nothing is fetched while data is read; download it and give its path")]
    WebAddress,

    /// A `data:` URL that is not base64, or without a comma.
    #[error("is a data: URL without `;base64,`; only base64 data is read")]
    DataUrl,

    /// The text is not base64.
    #[error("is not base64: {0}")]
    Base64(String),

    /// There is no byte.
    #[error("is empty (0 bytes)")]
    Empty,

    /// The content is a picture of a format that is not read.
    #[error("has {found} inside; only PNG and JPEG are read (the content counts, not the name): convert it")]
    Format {
        /// Name of the format, such as `a GIF`.
        found: &'static str,
    },

    /// The content is no picture.
    #[error("is not a picture: it starts with {0:?}")]
    NotAPicture(String),

    /// The file ends too early.
    #[error("is cut short: {0}")]
    CutShort(String),

    /// The content does not decode.
    #[error("is damaged: {0}")]
    Damaged(String),

    /// A kind of PNG or JPEG that is not read.
    #[error("is of a kind that is not read: {0}")]
    Unsupported(String),

    /// More pixels than allowed.
    #[error(
        "is {width} x {height} = {} pixels; at most {max_pixels} are allowed: scale it down, or raise the limit",
        u64::from(*width) * u64::from(*height)
    )]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The limit.
        max_pixels: u64,
    },

    /// A larger file than allowed.
    #[error("has {bytes} bytes; at most {max_bytes} are allowed: scale it down, or raise the limit")]
    TooManyBytes {
        /// Bytes of the file.
        bytes: u64,
        /// The limit.
        max_bytes: u64,
    },

    /// The number of samples is not width x height x 3.
    #[error("{width} x {height} RGB pixels need {} bytes, not {found}", width.saturating_mul(*height).saturating_mul(3))]
    WrongLength {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Bytes given.
        found: usize,
    },

    /// The rule for sizes has no answer for this shape.
    #[error("is {width} x {height}: {reason}")]
    Shape {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// What is wrong.
        reason: String,
    },
}

impl Error {
    /// Puts the name of the sample before the reason.
    pub(crate) fn of_sample(self, sample: &str) -> Self {
        Self::Sample { sample: sample.into(), cause: Box::new(self) }
    }
}
