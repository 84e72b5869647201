//! Writes "newc" cpio archives, the form in which the kernel takes an initramfs (Documentation/driver-api/early-userspace
//! /buffer-format.rst). Archives may follow one another; a later file takes the place of an earlier one.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};

const MAGIC: &str = "070701";
const END: &str = "TRAILER!!!";
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// Directories that are links into `usr` (merged /usr), so that every file has one place only.
const MERGED: &[&str] = &["bin", "lib", "lib64", "sbin"];

#[derive(Debug, Clone)]
enum Content {
    Directory,
    File(PathBuf),
    Bytes(Vec<u8>),
    Link(String),
    Character { major: u32, minor: u32 },
}

/// The files of an archive by path.
#[derive(Debug, Clone, Default)]
pub struct Archive {
    entries: BTreeMap<String, (u32, Content)>,
}

impl Archive {
    /// An archive without files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file of the host at `place`, with its permission bits.
    ///
    /// # Errors
    /// A host file that cannot be read.
    pub fn file(&mut self, place: &str, host: &Path) -> Result<&mut Self> {
        let mode = fs::metadata(host).at("read", host)?.permissions().mode() & 0o777;
        Ok(self.insert(place, REGULAR | mode, Content::File(host.to_owned())))
    }

    /// Adds a file with the given content.
    pub fn bytes(&mut self, place: &str, mode: u32, content: impl Into<Vec<u8>>) -> &mut Self {
        self.insert(place, REGULAR | (mode & 0o7777), Content::Bytes(content.into()))
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, place: &str, target: impl Into<String>) -> &mut Self {
        self.insert(place, LINK | 0o777, Content::Link(target.into()))
    }

    /// Adds a directory; the directories above a file come by themselves.
    pub fn directory(&mut self, place: &str) -> &mut Self {
        self.insert(place, DIRECTORY | 0o755, Content::Directory)
    }

    /// Adds a character device.
    pub fn character(&mut self, place: &str, major: u32, minor: u32) -> &mut Self {
        self.insert(place, CHARACTER | 0o600, Content::Character { major, minor })
    }

    /// Whether something stands at `place`.
    pub fn contains(&self, place: &str) -> bool {
        self.entries.contains_key(&merged(place))
    }

    /// Adds the links `bin`, `lib`, `lib64` and `sbin` into `usr`.
    pub fn merge_usr(&mut self) -> &mut Self {
        for name in MERGED {
            self.entries.insert((*name).to_owned(), (LINK | 0o777, Content::Link(format!("usr/{name}"))));
            self.directory(&format!("usr/{name}"));
        }
        self
    }

    fn insert(&mut self, place: &str, mode: u32, content: Content) -> &mut Self {
        let place = merged(place);
        let mut parent = place.as_str();
        while let Some((above, _)) = parent.rsplit_once('/') {
            self.entries.entry(above.to_owned()).or_insert((DIRECTORY | 0o755, Content::Directory));
            parent = above;
        }
        self.entries.insert(place, (mode, content));
        self
    }

    /// Writes the archive with its end mark, padded to 512 bytes.
    ///
    /// # Errors
    /// A host file that cannot be read or is 4 GiB or larger, or a failed write to `path` (which is named in errors).
    pub fn write(&self, writer: &mut impl Write, path: &Path) -> Result<()> {
        let mut length = 0_u64;
        for (number, (place, (mode, content))) in (1_u32..).zip(&self.entries) {
            let read;
            let (bytes, device) = match content {
                Content::Directory => (&[] as &[u8], (0, 0)),
                Content::File(host) => {
                    read = fs::read(host).at("read", host)?;
                    (read.as_slice(), (0, 0))
                }
                Content::Bytes(bytes) => (bytes.as_slice(), (0, 0)),
                Content::Link(target) => (target.as_bytes(), (0, 0)),
                Content::Character { major, minor } => (&[] as &[u8], (*major, *minor)),
            };
            let size = u32::try_from(bytes.len()).map_err(|_| Error::Malformed {
                path: place.into(),
                problem: format!("{} bytes do not fit into a cpio archive", bytes.len()),
            })?;
            length += entry(writer, &Header { number, mode: *mode, size, device, name: place }, bytes)
                .at("write", path)?;
        }
        let end = Header { number: 0, mode: 0, size: 0, device: (0, 0), name: END };
        length += entry(writer, &end, &[]).at("write", path)?;
        writer.write_all(&zeros(length, 512)).at("write", path)
    }
}

/// The place with its leading slash removed and `bin`, `lib`, `lib64` and `sbin` moved below `usr`.
fn merged(place: &str) -> String {
    let place = place.trim_start_matches("./").trim_matches('/');
    let first = place.split('/').next().unwrap_or_default();
    if MERGED.contains(&first) { format!("usr/{place}") } else { place.to_owned() }
}

struct Header<'a> {
    number: u32,
    mode: u32,
    size: u32,
    device: (u32, u32),
    name: &'a str,
}

/// Writes one entry; returns its length.
fn entry(writer: &mut impl Write, header: &Header<'_>, bytes: &[u8]) -> io::Result<u64> {
    let links = if header.mode & 0o170_000 == DIRECTORY { 2_u32 } else { 1 };
    let name_size = u32::try_from(header.name.len() + 1).map_err(io::Error::other)?;
    let mut text = String::from(MAGIC);
    let (major, minor) = header.device;
    // inode, mode, uid, gid, links, time, size, device of the file system (2), device of the node (2), name, check sum
    for field in [header.number, header.mode, 0, 0, links, 0, header.size, 0, 0, major, minor, name_size, 0] {
        text.push_str(&format!("{field:08x}"));
    }
    text.push_str(header.name);
    text.push('\0');
    let head = text.len() as u64;
    writer.write_all(text.as_bytes())?;
    writer.write_all(&zeros(head, 4))?;
    writer.write_all(bytes)?;
    writer.write_all(&zeros(bytes.len() as u64, 4))?;
    Ok(head.next_multiple_of(4) + (bytes.len() as u64).next_multiple_of(4))
}

/// Zero bytes that fill `length` up to a multiple of `unit` (at most 512).
fn zeros(length: u64, unit: u64) -> Vec<u8> {
    vec![0; usize::try_from(length.next_multiple_of(unit) - length).unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(archive: &Archive) -> Vec<u8> {
        let mut bytes = Vec::new();
        archive.write(&mut bytes, Path::new("test")).unwrap();
        bytes
    }

    /// Names in the archive, found by walking it as the format's description says.
    fn names(bytes: &[u8]) -> Vec<String> {
        let mut at = 0;
        let mut names = Vec::new();
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |index: usize| {
                let start = at + 6 + index * 8;
                usize::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            let (size, name_size) = (field(6), field(11));
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_size - 1].to_vec()).unwrap();
            if name == "TRAILER!!!" {
                return names;
            }
            names.push(name);
            at = (at + 110 + name_size).next_multiple_of(4);
            at = (at + size).next_multiple_of(4);
        }
    }

    #[test]
    fn parents_come_before_their_files_and_usr_is_merged() {
        let mut archive = Archive::new();
        archive
            .merge_usr()
            .bytes("/lib/deep/file", 0o644, "x")
            .bytes("init", 0o755, "abc")
            .link("etc/a", "b");
        archive.character("dev/console", 5, 1);
        let bytes = written(&archive);
        assert_eq!(bytes.len() % 512, 0);
        assert_eq!(
            names(&bytes),
            [
                "bin",
                "dev",
                "dev/console",
                "etc",
                "etc/a",
                "init",
                "lib",
                "lib64",
                "sbin",
                "usr",
                "usr/bin",
                "usr/lib",
                "usr/lib/deep",
                "usr/lib/deep/file",
                "usr/lib64",
                "usr/sbin"
            ]
        );
        assert!(archive.contains("usr/lib/deep/file") && archive.contains("/lib/deep/file"));
    }

    /// The header of a file, byte by byte, against the table in buffer-format.rst.
    #[test]
    fn a_file_has_the_documented_header() {
        let mut archive = Archive::new();
        archive.bytes("f", 0o644, "hello");
        let bytes = written(&archive);
        let expected = concat!(
            "070701",
            "00000001",
            "000081a4",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000005",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "f\0hello\0\0\0"
        );
        assert_eq!(&bytes[..expected.len()], expected.as_bytes());
    }
}
