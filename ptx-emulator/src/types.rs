//! Types and state spaces.

/// A fundamental type of PTX, or one of the packed and alternate formats that instructions name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub(crate) enum Type {
    U8, U16, U32, U64, S8, S16, S32, S64, B8, B16, B32, B64, F16, F16x2, Bf16, Bf16x2, Tf32, F32, F64, Pred,
}

/// Which of a warp's register files holds a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// One bit per lane.
    Predicate,
    /// Up to 32 bits per lane; narrower types leave the upper bits undefined.
    Narrow,
    /// 64 bits per lane.
    Wide,
}

impl Type {
    #[rustfmt::skip]
    const NAMES: [(&'static str, Type); 20] = {
        use Type::*;
        [
            ("u8", U8), ("u16", U16), ("u32", U32), ("u64", U64), ("s8", S8), ("s16", S16), ("s32", S32), ("s64", S64),
            ("b8", B8), ("b16", B16), ("b32", B32), ("b64", B64), ("f16", F16), ("f16x2", F16x2), ("bf16", Bf16),
            ("bf16x2", Bf16x2), ("tf32", Tf32), ("f32", F32), ("f64", F64), ("pred", Pred),
        ]
    };

    /// A type by its name without the dot.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == name).map(|(_, ty)| *ty)
    }

    pub fn bytes(self) -> u64 {
        use Type::*;
        match self {
            U8 | S8 | B8 | Pred => 1,
            U16 | S16 | B16 | F16 | Bf16 => 2,
            U32 | S32 | B32 | F32 | F16x2 | Bf16x2 | Tf32 => 4,
            U64 | S64 | B64 | F64 => 8,
        }
    }

    pub fn class(self) -> Class {
        match self {
            Self::Pred => Class::Predicate,
            _ if self.bytes() == 8 => Class::Wide,
            _ => Class::Narrow,
        }
    }

    pub fn signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn integer(self) -> bool {
        !self.float() && self != Self::Pred
    }

    pub fn float(self) -> bool {
        use Type::*;
        matches!(self, F16 | F16x2 | Bf16 | Bf16x2 | Tf32 | F32 | F64)
    }
}

/// A state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

/// Where generic addresses of each space begin; global addresses are generic ones as they are.
pub(crate) const SHARED_WINDOW: u64 = 0x100_0000_0000;
pub(crate) const LOCAL_WINDOW: u64 = 0x200_0000_0000;
pub(crate) const PARAM_WINDOW: u64 = 0x300_0000_0000;
/// Module variables (`.global`, `.const`) live in global memory from here on.
pub(crate) const MODULE_BASE: u64 = 0x400_0000_0000;
/// Length of a window.
pub(crate) const WINDOW: u64 = 0x1_0000_0000;

impl Space {
    /// A space by its directive, with the dot.
    pub fn named(word: &str) -> Option<Self> {
        Some(match word {
            ".global" => Self::Global,
            ".const" => Self::Const,
            ".shared" | ".shared::cta" => Self::Shared,
            ".local" => Self::Local,
            ".param" | ".param::entry" => Self::Param,
            _ => return None,
        })
    }

    /// The first generic address of this space.
    pub fn window(self) -> u64 {
        match self {
            Self::Shared => SHARED_WINDOW,
            Self::Local => LOCAL_WINDOW,
            Self::Param => PARAM_WINDOW,
            Self::Generic | Self::Global | Self::Const => 0,
        }
    }

    /// The space that a generic address lies in, and the address there.
    pub fn of_generic(address: u64) -> (Self, u64) {
        for space in [Self::Shared, Self::Local, Self::Param] {
            if address.wrapping_sub(space.window()) < WINDOW {
                return (space, address - space.window());
            }
        }
        (Self::Global, address)
    }
}
