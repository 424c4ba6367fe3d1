//! From chat messages and pictures to token ids and pixel patches, as Hugging Face's processors do it.

mod chat;
mod error;
mod files;
mod gemma4;
mod message;
mod picture;
mod resize;
mod template;
mod tokenizer;

pub use chat::{ChatEncoder, EncodedChat, Expansion};
pub use error::{Error, PictureFault, Result};
pub use gemma4::{Gemma4ImageSettings, Gemma4Processor, Gemma4Sample, ImagePatches, PatchLayout, Request};
pub use message::{Message, Part};
pub use minijinja::Value as TemplateValue;
pub use picture::{Picture, PictureLimits, PictureSource};
pub use resize::resize_bicubic;
pub use template::{ChatTemplate, Rendered, TemplateInputs};
pub use tokenizer::{TextTokenizer, TextTokens};
