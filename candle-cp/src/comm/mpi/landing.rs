//! Memory of messages: where a sent tensor lies, and room for one that comes.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};

macro_rules! landing {
    ($($kind:ident $element:ty),*) => {
        /// Room for a tensor, which MPI writes to directly.
        pub enum Landing {
            $($kind(Vec<$element>)),*
        }

        impl Landing {
            /// Room for so many elements; `None` if there is not that much memory, or no such type travels.
            pub fn new(dtype: DType, elements: usize) -> Option<Self> {
                match dtype {
                    $(DType::$kind => {
                        let mut room = Vec::new();
                        room.try_reserve_exact(elements).ok()?;
                        Some(Self::$kind(room))
                    })*
                    _ => None,
                }
            }

            /// Its first byte.
            pub fn place(&mut self) -> *mut u8 {
                match self {
                    $(Self::$kind(room) => room.as_mut_ptr().cast()),*
                }
            }

            /// The tensor that came.
            ///
            /// # Safety
            /// As many elements as `dims` make have been written.
            pub unsafe fn into_tensor(self, dims: &[usize]) -> candle_core::Result<Tensor> {
                match self {
                    $(Self::$kind(mut room) => {
                        let len = dims.iter().product();
                        assert!(len <= room.capacity(), "made for these dimensions");
                        // SAFETY: the caller's promise; any bits are a number.
                        unsafe { room.set_len(len) };
                        Tensor::from_vec(room, dims, &Device::Cpu)
                    }),*
                }
            }
        }

        /// The first byte of a contiguous tensor on the CPU; `None` for any other.
        pub fn address(tensor: &Tensor) -> Option<*const u8> {
            let (storage, layout) = tensor.storage_and_layout();
            let (start, end) = layout.contiguous_offsets()?;
            match &*storage {
                $(Storage::Cpu(CpuStorage::$kind(all)) => Some(all[start..end].as_ptr().cast()),)*
                _ => None,
            }
        }
    };
}

landing!(U8 u8, U32 u32, I64 i64, F16 f16, BF16 bf16, F32 f32, F64 f64);
