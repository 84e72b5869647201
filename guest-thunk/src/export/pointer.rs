//! The pointers of the C API as types. They have the layout of the pointers, so they stand in the functions' signatures.
//!
//! What a caller of a C API promises (hsakmt.h): a pointer is null, or points to as many elements as the function says,
//! which nobody else uses for the time of the call. Only such callers make values of these types, by calling an
//! `unsafe extern "C"` function; so the methods are safe. All accesses are unaligned: the header packs its
//! structs to 4 bytes.
#![allow(unsafe_code, reason = "the C API's pointers are read and written here and nowhere else")]

use std::os::fd::{FromRawFd, OwnedFd};

use crate::thunk::refusal::{Outcome, Refusal};

/// A pointer to a value that the function writes, and may read first. May be null.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

/// A pointer to a value, or to the first of several, that the function reads. May be null.
#[derive(Debug)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> From<*mut T> for Out<T> {
    fn from(pointer: *mut T) -> Self {
        Out(pointer)
    }
}

impl<T> From<*const T> for In<T> {
    fn from(pointer: *const T) -> Self {
        In(pointer)
    }
}

impl<T: Copy> Out<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses a null pointer by its parameter's name.
    pub fn required(self, parameter: &'static str) -> Outcome<Self> {
        if self.is_null() { Err(Refusal::parameter(format!("{parameter} is NULL"))) } else { Ok(self) }
    }

    /// Writes the value; a null pointer takes none.
    pub fn write(self, value: T) {
        self.write_at(0, value);
    }

    /// Writes as many elements; a null pointer takes none.
    pub fn write_all(self, values: &[T]) {
        for (index, value) in values.iter().enumerate() {
            self.write_at(index, *value);
        }
    }

    fn write_at(self, index: usize, value: T) {
        if !self.is_null() {
            // SAFETY: the caller's array has more than `index` elements, so the sum stays within it.
            let place = unsafe { self.0.add(index) };
            // SAFETY: the place is an element of the caller's array.
            unsafe { place.write_unaligned(value) };
        }
    }

    /// Reads the value, if there is one.
    pub fn read(self) -> Option<T> {
        In(self.0.cast_const()).read()
    }

    /// Reads that many elements. None but no elements are at a null pointer.
    pub fn read_all(self, count: usize) -> Vec<T> {
        In(self.0.cast_const()).read_all(count)
    }

    /// The same place as bytes.
    pub fn bytes(self) -> Out<u8> {
        Out(self.0.cast())
    }

    /// Its address.
    pub fn address(self) -> usize {
        self.0.addr()
    }
}

impl<T: Copy> In<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Reads the value, if there is one.
    pub fn read(self) -> Option<T> {
        self.read_at(0)
    }

    /// Reads that many elements. None but no elements are at a null pointer.
    pub fn read_all(self, count: usize) -> Vec<T> {
        (0..count).map_while(|index| self.read_at(index)).collect()
    }

    fn read_at(self, index: usize) -> Option<T> {
        if self.is_null() {
            return None;
        }
        // SAFETY: the caller's array has more than `index` elements, so the sum stays within it.
        let place = unsafe { self.0.add(index) };
        // SAFETY: the place is an element of the caller's array, which holds values of C types: any bytes are valid.
        Some(unsafe { place.read_unaligned() })
    }
}

impl<T> Out<T> {
    /// Gives the caller a value that is its until [`Out::take_back`].
    pub fn give(value: T) -> Out<T> {
        Out(Box::into_raw(Box::new(value)))
    }

    /// Takes back what [`Out::give`] gave, once.
    ///
    /// # Safety
    /// The pointer came from `give`, and nobody uses it any more.
    pub unsafe fn take_back(self) {
        // SAFETY: it came from Box::into_raw, and this is the only time that it is taken back, as the caller promises.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// An address of the process that is handed on and not accessed, or only where the argument says that it is a range of
/// memory.
pub type Address = *mut libc::c_void;

/// The number of an address.
pub fn number<T>(address: *const T) -> u64 {
    // Lossless on the 64-bit targets of the library.
    address.addr() as u64
}

/// A copy of a descriptor that the caller names by number, which it may close or not.
pub fn descriptor(number: u64) -> Outcome<OwnedFd> {
    let unknown = || Refusal::error(format!("{number} is no open descriptor"));
    let raw = i32::try_from(number).map_err(|_| unknown())?;
    // SAFETY: fcntl takes no pointer here, and answers EBADF to what is no descriptor.
    let copy = unsafe { libc::fcntl(raw, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(unknown());
    }
    // SAFETY: fcntl has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_takes_and_gives_nothing() {
        let null = Out::<u32>::from(std::ptr::null_mut());
        null.write(1);
        null.write_all(&[1, 2]);
        assert_eq!(null.read(), None);
        assert!(null.read_all(3).is_empty());
        assert!(null.required("Counters").unwrap_err().to_string().contains("Counters is NULL"));
    }

    #[test]
    fn elements_may_be_unaligned() {
        let mut bytes = [0u8; 25];
        let place = Out::<u64>::from(bytes[1..].as_mut_ptr().cast::<u64>());
        place.write_all(&[1, 2, 3]);
        assert_eq!(place.read_all(3), [1, 2, 3]);
        assert_eq!(bytes[9], 2);
    }
}
