//! From chat messages and pictures to token ids and pixel patches, as Hugging Face's processors do it.
//!
//! A [`Gemma4Processor`] or a [`Qwen3_5Processor`] is read from a checkpoint folder in Hugging Face layout and turns one
//! sample at a time into what the model takes: the same text, ids, token types, pixels and positions as transformers
//! 5.24 with Pillow. What
//! differs on purpose is marked `DIFFERENCE` where it happens. No model, no tensor library, no network; only PNG and
//! JPEG pictures; no video, no audio.
//!
//! ```
//! use std::path::Path;
//!
//! use candle_vlm_processor::{Gemma4Processor, Message, Request};
//!
//! # let checkpoint = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/gemma4-dense/checkpoint"));
//! # let pictures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/imaging"));
//! let processor = Gemma4Processor::from_folder(checkpoint)?;
//! let messages = Message::list_from_json(
//!     r#"[{"role": "user", "content": [{"type": "image", "image": "tall.png"}, {"type": "text", "text": "Is it tall?"}]},
//!         {"role": "assistant", "content": "Yes, it is tall."}]"#,
//! )?;
//! let request = Request { folder: pictures, max_tokens: Some(1024), ..Request::new("train.jsonl line 1", &messages) };
//! let sample = processor.process(&request)?;
//!
//! // The patches of the picture, and as many placeholders in the ids as it has soft tokens.
//! let image = &sample.images[0];
//! assert_eq!(image.pixels.len(), image.patches * image.patch_dim);
//! assert_eq!(sample.chat.ids.iter().filter(|&&id| id == processor.image_token_id()).count(), image.soft_tokens);
//!
//! // From the text to its tokens: what an answer's loss is taken over.
//! let answer = sample.chat.rendered.find("Yes, it is tall.").unwrap();
//! let tokens = sample.chat.tokens_of(answer..answer + "Yes, it is tall.".len());
//! let text = processor.chat().tokenizer().decode(&sample.chat.ids[tokens], false)?;
//! assert_eq!(text, "Yes, it is tall.");
//! # Ok::<(), candle_vlm_processor::Error>(())
//! ```
//!
//! The parts can be used alone: [`Picture`] decodes, [`resize_bicubic`] resizes, an [`ImageSettings`] cuts patches,
//! [`ChatTemplate`] renders, [`TextTokenizer`] encodes, and a [`ChatEncoder`] joins the last two. A [`Processor`] joins all
//! of them, for the image settings of one family. [`qwen3_5`] also has the positions that this family's model needs.

mod answers;
mod chat;
mod error;
mod fields;
mod files;
mod gemma4;
mod image_settings;
mod message;
mod patches;
mod picture;
mod processor;
pub mod qwen3_5;
mod request;
mod resize;
mod template;
mod tokenizer;

pub use answers::{Answer, AnswerFinder};
pub use chat::{ChatEncoder, EncodedChat, Expansion};
pub use error::{Error, PictureFault, Result};
pub use gemma4::{Gemma4ImageSettings, Gemma4Processor, PatchLayout};
pub use image_settings::{ImageSettings, ImageTokens};
pub use message::{Message, Part};
pub use minijinja::Value as TemplateValue;
pub use patches::ImagePatches;
pub use picture::{Picture, PictureLimits, PictureSource};
pub use processor::{ChatSample, Processor};
pub use qwen3_5::{Qwen3_5ImageSettings, Qwen3_5Processor};
pub use request::Request;
pub use resize::resize_bicubic;
pub use template::{ChatTemplate, Rendered, TemplateInputs};
pub use tokenizer::{TextTokenizer, TextTokens};
