//! Which shared mappings of files lie in a range: by PROCMAP_QUERY of linux/fs.h (Linux 6.11), which passes over all others in
//! the kernel, elsewhere out of the list of all mappings.
#![allow(unsafe_code, reason = "a bare system call, as the list is read")]

use std::io;
use std::ops::Range;

use kfd_abi::ioctl::{Direction, request};

use super::maps::{Area, FilePlace, areas};
use super::proc::{self, Opened};
use super::syscall::call;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct Query {
    /// Bytes of this.
    size: u64,
    flags: u64,
    address: u64,
    /// From here on what the kernel answers; sizes of 0 ask for no names.
    start: u64,
    end: u64,
    access: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

const PROCMAP_QUERY: u32 = request(Direction::ReadWrite, b'f', 17, size_of::<Query>());

/// `enum procmap_query_flags`: what a mapping must have, and is told to have.
const READABLE: u64 = 0x01;
const WRITABLE: u64 = 0x02;
const EXECUTABLE: u64 = 0x04;
const SHARED: u64 = 0x08;
/// The next one where none has the address.
const COVERING_OR_NEXT: u64 = 0x10;
const FILE_BACKED: u64 = 0x20;

/// The shared mappings of files that a range touches, in order, without their names.
///
/// # Errors
/// /proc/self/maps cannot be read.
pub fn shared_files(range: &Range<u64>) -> io::Result<Vec<Area>> {
    match query(range) {
        Ok(found) => Ok(found),
        // An older kernel, or a filter of system calls.
        Err(_) => listed(range),
    }
}

fn listed(range: &Range<u64>) -> io::Result<Vec<Area>> {
    let mut found = areas(range)?;
    found.retain(|area| area.file.inode != 0 && area.permissions.ends_with('s'));
    found.iter_mut().for_each(|area| area.name.clear());
    Ok(found)
}

fn query(range: &Range<u64>) -> io::Result<Vec<Area>> {
    let file = proc::MAPS.open()?;
    let mut found: Vec<Area> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let Some(mut area) = next(&file, at)?.filter(|area| area.start < range.end && area.end > at) else {
            break;
        };
        at = area.end;
        // Mappings may become one meanwhile.
        if let Some(before) = found.last() {
            area.begin_at(before.end);
        }
        found.push(area);
    }
    file.check()?;
    Ok(found)
}

/// The first one that ends above an address.
fn next(file: &Opened, address: u64) -> io::Result<Option<Area>> {
    let size = size_of::<Query>() as u64;
    let mut query =
        Query { size, flags: SHARED | COVERING_OR_NEXT | FILE_BACKED, address, ..Query::default() };
    let place = std::ptr::from_mut(&mut query).expose_provenance();
    let arguments = [file.descriptor() as usize, PROCMAP_QUERY as usize, place];
    // SAFETY: the argument is exclusive, of the request's size, and valid whatever is written; it asks for nothing to be written
    // elsewhere.
    match unsafe { call(libc::SYS_ioctl, arguments) } {
        Ok(_) => {}
        Err(libc::ENOENT) => return Ok(None),
        Err(code) => return Err(io::Error::from_raw_os_error(code)),
    }
    let letters = [(READABLE, 'r'), (WRITABLE, 'w'), (EXECUTABLE, 'x'), (SHARED, 's')];
    let permissions = letters.iter().map(|(bit, letter)| if query.access & bit != 0 { *letter } else { '-' });
    Ok(Some(Area {
        start: query.start,
        end: query.end,
        permissions: permissions.collect(),
        // As the list has it (show_vma_header_prefix).
        file: FilePlace {
            device: format!("{:02x}:{:02x}", query.major, query.minor),
            inode: query.inode,
            offset: query.offset,
        },
        name: String::new(),
        flags: Vec::new(),
        key: 0,
    }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::thunk::memory::address::{Reservation, page_size};

    #[test]
    fn the_request_is_the_headers() {
        // linux/fs.h of Linux 6.11, computed by hand: _IOWR('f', 17, struct procmap_query).
        assert_eq!((size_of::<Query>(), PROCMAP_QUERY), (104, 0xc068_6611));
    }

    /// Both ways, and what is there by the calls that made it.
    #[test]
    fn shared_mappings_of_files_are_found_among_others() {
        let page = page_size();
        let home = Reservation::new(12 * page, page, 0, (0, u64::MAX)).unwrap();
        let file = File::from(memfd_create(c"shared", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(8 * page).unwrap();
        let map = |at: u64, pages: u64, access: i32, kind: i32, from: u64| {
            let place = std::ptr::with_exposed_provenance_mut((home.start() + at * page) as usize);
            let (length, from) = ((pages * page) as usize, (from * page) as i64);
            let number = if kind & libc::MAP_ANONYMOUS != 0 { -1 } else { file.as_raw_fd() };
            // SAFETY: the range is this test's own.
            let mapped = unsafe { libc::mmap(place, length, access, kind | libc::MAP_FIXED, number, from) };
            assert_eq!(mapped, place);
        };
        let both = libc::PROT_READ | libc::PROT_WRITE;
        map(1, 2, both, libc::MAP_SHARED, 3);
        map(3, 1, both, libc::MAP_PRIVATE, 5);
        map(4, 1, both, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0);
        map(6, 2, libc::PROT_NONE, libc::MAP_SHARED, 1);
        map(8, 1, libc::PROT_READ, libc::MAP_SHARED, 0);
        let all = home.start()..home.start() + 12 * page;
        let place = |offset: u64| {
            use std::os::unix::fs::MetadataExt;
            (file.metadata().unwrap().ino(), offset * page)
        };
        let expected = [(1, 3, "rw-s", place(3)), (6, 8, "---s", place(1)), (8, 9, "r--s", place(0))];
        let seen = |found: &[Area]| -> Vec<_> {
            let pages = |address: u64| (address - home.start()) / page;
            let one = |area: &Area| {
                let file = (area.file.inode, area.file.offset);
                (pages(area.start), pages(area.end), area.permissions.clone(), file)
            };
            found.iter().map(one).collect()
        };
        let expected = expected.map(|(start, end, access, file)| (start, end, access.to_owned(), file));
        let by_list = listed(&all).unwrap();
        assert_eq!(seen(&by_list), expected);
        match query(&all) {
            Ok(found) => {
                assert_eq!(found, by_list, "the device, too");
                let part = home.start() + 2 * page..home.start() + 7 * page;
                assert_eq!(query(&part).unwrap(), listed(&part).unwrap());
                let hole = home.start() + 9 * page..home.start() + 10 * page;
                assert_eq!(query(&hole).unwrap(), []);
            }
            Err(error) => println!("SKIP: PROCMAP_QUERY: {error}"),
        }
        assert_eq!(shared_files(&all).unwrap(), by_list);
    }
}
