//! The expert block of a layer: a router that chooses a few experts for each token, and the norms around the experts.

mod block;
mod router;
#[cfg(test)]
mod tests;

pub(crate) use self::block::MoeBlock;
pub(crate) use self::router::Router;
