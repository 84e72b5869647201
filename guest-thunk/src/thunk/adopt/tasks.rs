//! Threads in /proc/self/task, read without allocation or lock: who reads may have stopped a thread that holds any.
#![allow(unsafe_code, reason = "bare system calls")]

use super::syscall::call;

/// The next entry of a directory of threads (`struct linux_dirent64`): its number, 0 for what is none, and the rest.
pub fn next_thread(entries: &[u8]) -> Option<(i32, &[u8])> {
    let [a, b] = *entries.get(16..18)?.first_chunk::<2>()?;
    let length = usize::from(u16::from_ne_bytes([a, b]));
    let (entry, rest) = entries.split_at_checked(length)?;
    let name = entry.get(19..)?;
    let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
    let id = digits.fold(0i32, |id, digit| id.saturating_mul(10).saturating_add(i32::from(digit - b'0')));
    (length > 0).then_some((id, rest))
}

/// Whether a thread has ended: state Z or X in its stat file. `tasks` is a descriptor of the directory.
pub fn is_dead(tasks: i32, id: libc::pid_t) -> bool {
    let path = stat_path(id);
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let name = path.as_ptr().expose_provenance();
    // SAFETY: the path ends with a zero.
    let file = match unsafe { call(libc::SYS_openat, [tasks as usize, name, flags as usize, 0]) } {
        Ok(file) => file,
        Err(errno) => return errno == libc::ENOENT,
    };
    let mut text = [0u8; 128];
    let place = text.as_mut_ptr().expose_provenance();
    // SAFETY: the buffer is as large as is said.
    let length = unsafe { call(libc::SYS_read, [file, place, text.len(), 0]) };
    // SAFETY: the descriptor is this function's own.
    let _ = unsafe { call(libc::SYS_close, [file, 0, 0, 0]) };
    // One that ends between the two calls cannot be read any more (ESRCH).
    let Ok(length) = length else { return length == Err(libc::ESRCH) };
    let text = text.get(..length).unwrap_or(&[]);
    // The name of the thread stands in parentheses, and may have some itself.
    let name_end = text.iter().rposition(|byte| *byte == b')');
    let state = name_end.and_then(|end| text.get(end.saturating_add(2)));
    matches!(state, Some(b'Z' | b'X'))
}

/// `<id>/stat`, relative to the directory of threads, with a zero at its end.
fn stat_path(id: libc::pid_t) -> [u8; 17] {
    let mut path = [0u8; 17];
    let number = id.unsigned_abs();
    let digits = (0..10u32).rev().filter_map(|power| 10u32.checked_pow(power));
    let digits = digits
        .skip_while(|unit| *unit > number.max(1))
        .map(|unit| b'0'.wrapping_add((number / unit % 10) as u8));
    for (place, byte) in path.iter_mut().zip(digits.chain(*b"/stat")) {
        *place = byte;
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_digits() {
        assert!(stat_path(1).starts_with(b"1/stat\0"));
        assert!(stat_path(1_000_200).starts_with(b"1000200/stat\0"));
        assert!(stat_path(i32::MAX).starts_with(b"2147483647/stat\0"));
    }

    #[test]
    fn entries_of_a_directory() {
        // struct linux_dirent64: inode, offset, length, type, name.
        let entry = |name: &[u8]| {
            let mut bytes = vec![0u8; 16];
            let length = (19 + name.len() + 1).next_multiple_of(8);
            bytes.extend_from_slice(&(length as u16).to_ne_bytes());
            bytes.push(4);
            bytes.extend_from_slice(name);
            bytes.resize(length, 0);
            bytes
        };
        let all = [entry(b"."), entry(b".."), entry(b"4711"), entry(b"99999")].concat();
        let mut rest = &all[..];
        let mut found = Vec::new();
        while let Some((id, next)) = next_thread(rest) {
            found.push(id);
            rest = next;
        }
        assert_eq!(found, [0, 0, 4711, 99999]);
        assert!(next_thread(&all[..20]).is_none(), "cut off");
        assert!(next_thread(&[0; 64]).is_none(), "an entry without a length");
    }
}
