//! System calls that touch nothing of the calling thread, not even `errno`: the tracer runs with the thread pointer of a
//! thread that runs at the same time.
#![allow(unsafe_code, reason = "system calls")]

use std::ffi::{c_int, c_long};

/// Makes a system call of up to six arguments. The error is the kernel's number.
///
/// # Safety
/// As that of the call: pointers among the arguments, made by `expose_provenance`, are valid for what the kernel does.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call<const N: usize>(number: c_long, arguments: [usize; N]) -> Result<usize, c_int> {
    let [first, second, third, fourth, fifth, sixth] = six(arguments);
    let result: isize;
    // SAFETY: the kernel's convention for x86-64 (syscall(2)): it changes rax, rcx and r11, and uses no stack of the
    // program. The memory that it uses is the caller's promise.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            in("r9") sixth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // Errors are -4095 to -1.
    match usize::try_from(result) {
        Ok(result) => Ok(result),
        Err(_) => Err(result.unsigned_abs() as c_int),
    }
}

/// Where the convention is not known here: by the C library, which does set `errno`.
///
/// # Safety
/// As that of the call.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn call<const N: usize>(number: c_long, arguments: [usize; N]) -> Result<usize, c_int> {
    let [first, second, third, fourth, fifth, sixth] = six(arguments);
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(number, first, second, third, fourth, fifth, sixth) };
    usize::try_from(result).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// The arguments, and zeros for the others.
fn six<const N: usize>(arguments: [usize; N]) -> [usize; 6] {
    const { assert!(N <= 6, "a system call has six arguments at most") };
    let mut all = [0; 6];
    all.iter_mut().zip(arguments).for_each(|(place, argument)| *place = argument);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_an_answer_and_leaves_errno_alone() {
        // SAFETY: no argument; the place is this thread's own.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above, and no reference to it lives.
        unsafe { errno.write(77) };
        // SAFETY: no pointer.
        let answer = unsafe { call(libc::SYS_close, [usize::MAX, 0, 0, 0]) };
        assert_eq!(answer, Err(libc::EBADF));
        // SAFETY: as above.
        let left = unsafe { errno.read() };
        assert!(left == 77 || cfg!(not(target_arch = "x86_64")), "{left}");
        // SAFETY: no pointer.
        let own = unsafe { call(libc::SYS_getpid, [0; 4]) };
        assert_eq!(own, Ok(std::process::id() as usize));
    }

    #[test]
    fn arguments_are_in_their_places() {
        let (from, mut to) = (*b"four", [0u8; 4]);
        let mut ends = [0 as c_int; 2];
        // SAFETY: the array lives beyond the call, and has two places.
        unsafe { call(libc::SYS_pipe2, [ends.as_mut_ptr().expose_provenance(), 0, 0, 0]) }.unwrap();
        let [reader, writer] = ends.map(|end| end as usize);
        // SAFETY: as many bytes as is said.
        unsafe { call(libc::SYS_write, [writer, from.as_ptr().expose_provenance(), 4, 0]) }.unwrap();
        // SAFETY: as many bytes as is said, and the place is exclusive.
        let read = unsafe { call(libc::SYS_read, [reader, to.as_mut_ptr().expose_provenance(), 4, 0]) };
        assert_eq!((read, to), (Ok(4), from));
        // The fourth: pread64 of a pipe is ESPIPE, of a file from an offset is the rest.
        let file = std::fs::File::open("/proc/self/cmdline").unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file) as usize;
        let (mut whole, mut rest) = ([0u8; 8], [0u8; 7]);
        for (place, offset) in [(&mut whole[..], 0), (&mut rest[..], 1)] {
            let (start, length) = (place.as_mut_ptr().expose_provenance(), place.len());
            // SAFETY: as many bytes as is said, and the place is exclusive.
            unsafe { call(libc::SYS_pread64, [descriptor, start, length, offset]) }.unwrap();
        }
        assert_eq!(whole[1..], rest);
        // The fifth and the sixth: a file mapped from its second page on.
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file) as usize;
        let (protection, flags) = (libc::PROT_READ as usize, libc::MAP_PRIVATE as usize);
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let mapped = unsafe { call(libc::SYS_mmap, [0, 4096, protection, flags, descriptor, 4096]) }.unwrap();
        let mut second = [0u8; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut second, 4096).unwrap();
        // SAFETY: the page has just been mapped, and nobody changes it.
        let page: &[u8] =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(mapped), 4096) };
        assert_eq!(page, second);
        // SAFETY: the mapping is this test's own, and no longer used.
        unsafe { call(libc::SYS_munmap, [mapped, 4096]) }.unwrap();
        for end in [reader, writer] {
            // SAFETY: this test's own descriptors.
            unsafe { call(libc::SYS_close, [end, 0, 0, 0]) }.unwrap();
        }
    }
}
