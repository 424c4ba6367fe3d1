//! Content to pixels, against Pillow and against the facts of files that broke other programs.

mod support;

use std::path::Path;

use candle_vlm_processor::{Picture, PictureFault, PictureLimits, PictureSource};
use serde_json::Value;
use support::{Tensors, data, json, largest_difference};

fn decode(content: &[u8]) -> Result<Picture, PictureFault> {
    Picture::decode(content, &PictureLimits::default())
}

fn load(path: &Path) -> Result<Picture, PictureFault> {
    let source = PictureSource::Path(path.into());
    source.load(Path::new(""), &PictureLimits::default()).map(|picture| (*picture).clone())
}

/// Size and corner colours as in a facts file, each channel within `tolerance`.
fn assert_corners(name: &str, picture: &Picture, facts: &Value, tolerance: u8) {
    let (w, h) = (picture.width(), picture.height());
    assert_eq!(serde_json::json!([w, h]), facts["size"], "{name}");
    let corners = [(0, 0), (w - 1, 0), (0, h - 1), (w - 1, h - 1)];
    for ((x, y), expected) in corners.into_iter().zip(facts["corners tl tr bl br"].as_array().unwrap()) {
        let expected: Vec<u8> = serde_json::from_value(expected.clone()).unwrap();
        let found = picture.pixel(x, y);
        assert!(largest_difference(&found, &expected) <= tolerance, "{name} ({x}, {y}): {found:?}, not {expected:?}");
    }
}

#[test]
fn every_colour_type_is_as_in_pillow() {
    let folder = data("pillow");
    let expected = Tensors::open(&folder.join("expected.safetensors"));
    let names = expected.names();
    assert!(names.len() > 40, "only {} pictures", names.len());
    for name in names {
        let picture = load(&folder.join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!([picture.height(), picture.width()], expected.shape(&name)[..2], "{name}");
        let mut pixels = expected.u8(&name);
        if expected.shape(&name).len() == 2 {
            pixels = pixels.into_iter().flat_map(|g| [g; 3]).collect(); // stored as one channel
        }
        // PNG has one right answer. Decoders of JPEG round differently, and differ in how they widen halved colours.
        let tolerance = match &name[..] {
            "photo-422.jpg" | "photo-420.jpg" => 6,
            _ if name.ends_with(".jpg") => 2,
            _ => 0,
        };
        let found = largest_difference(picture.rgb_hwc(), &pixels);
        assert!(found <= tolerance, "{name}: {found} levels");
    }
}

#[test]
fn phone_pictures_stand_upright() {
    let folder = data("exif");
    for (name, facts) in json(&folder.join("facts.json")).as_object().unwrap() {
        assert_corners(name, &load(&folder.join(name)).unwrap(), facts, 2);
    }
}

#[test]
fn broken_pictures_are_errors() {
    let folder = data("broken");
    for (name, outcome) in json(&folder.join("facts.json"))["Pillow"].as_object().unwrap() {
        let result = load(&folder.join(name));
        match outcome.as_str().unwrap() {
            "decodes" => assert!(result.is_ok(), "{name}: {result:?}"),
            _ => assert!(result.is_err(), "{name} decoded"),
        }
    }
    let fault = |name: &str| load(&folder.join(name)).unwrap_err();
    assert!(matches!(fault("cut.jpg"), PictureFault::CutShort(_)));
    assert!(matches!(fault("cut.png"), PictureFault::CutShort(_)));
    assert!(matches!(fault("bad-crc.png"), PictureFault::Damaged(_)));
    assert!(matches!(fault("empty.jpg"), PictureFault::Empty));
    assert!(matches!(fault("page.jpg"), PictureFault::NotAPicture(_)));
    assert!(matches!(fault("absent.jpg"), PictureFault::Io(_)));
}

#[test]
fn a_picture_cut_anywhere_is_an_error() {
    for name in ["photo-420.jpg", "photo-progressive.jpg", "photo-restart.jpg", "photo-grey.jpg", "inks-adobe.jpg"] {
        let content = std::fs::read(data("pillow").join(name)).unwrap();
        for end in 0..content.len() {
            assert!(decode(&content[..end]).is_err(), "{name}, first {end} of {} bytes", content.len());
        }
    }
    let content = std::fs::read(data("pillow/rgba.png")).unwrap();
    for end in 0..content.len() - 12 {
        assert!(decode(&content[..end]).is_err(), "first {end} of {} bytes", content.len()); // the end chunk may lack
    }
}

#[test]
fn damaged_bytes_end_in_a_picture_or_an_error() {
    for name in ["photo-420.jpg", "photo-progressive.jpg", "photo-restart.jpg", "inks-adobe.jpg", "palette-alpha-4.png"]
    {
        let content = std::fs::read(data("pillow").join(name)).unwrap();
        let places = support::noise(3 * 1000, 7);
        for bytes in places.chunks_exact(3) {
            let mut damaged = content.clone();
            let at = (usize::from(bytes[0]) * 256 + usize::from(bytes[1])) % content.len();
            damaged[at] = bytes[2];
            if let Ok(picture) = Picture::decode(&damaged, &PictureLimits { max_pixels: 1 << 20, max_bytes: 1 << 20 }) {
                assert_eq!(picture.rgb_hwc().len(), picture.width() * picture.height() * 3);
            }
        }
    }
}

#[test]
fn bytes_behind_the_picture_do_not_count() {
    for name in ["photo-420.jpg", "photo-progressive.jpg", "rgba.png"] {
        let content = std::fs::read(data("pillow").join(name)).unwrap();
        let longer = [&content[..], b"\xff\xd8\xff\xe0 a second picture"].concat();
        assert_eq!(decode(&longer).unwrap(), decode(&content).unwrap(), "{name}");
    }
}

#[test]
fn prints_are_not_inverted() {
    let folder = data("cmyk");
    let right = load(&folder.join("right.png")).unwrap();
    let facts = json(&folder.join("facts.json"));
    let (_, files) = facts.as_object().unwrap().iter().next().unwrap();
    for (name, quarters) in files.as_object().unwrap() {
        let picture = load(&folder.join(name)).unwrap();
        let (w, h) = (picture.width(), picture.height());
        assert_eq!((w, h), (right.width(), right.height()));
        for (color, expected) in quarters.as_object().unwrap() {
            let expected: Vec<u8> = serde_json::from_value(expected.clone()).unwrap();
            let quarter = [1, 3, 5, 7]
                .map(|eighth| (w * eighth / 8, h / 2))
                .into_iter()
                .find(|&(x, y)| largest_difference(&right.pixel(x, y), &expected) <= 6)
                .unwrap_or_else(|| panic!("no {color} quarter in right.png"));
            let found = picture.pixel(quarter.0, quarter.1);
            assert!(largest_difference(&found, &expected) <= 6, "{name} {color}: {found:?}, not {expected:?}");
        }
    }
}

#[test]
fn the_content_decides_not_the_name() {
    let folder = data("wrong-name");
    for (name, facts) in json(&folder.join("facts.json")).as_object().unwrap() {
        let result = load(&folder.join(name));
        match facts["format"].as_str().unwrap() {
            "PNG" => assert_corners(name, &result.unwrap(), facts, 0),
            "JPEG" => assert_corners(name, &result.unwrap(), facts, 2),
            format => {
                let message = result.unwrap_err().to_string();
                let start = if format == "GIF" { "has a GIF inside" } else { "has a WebP picture inside" };
                assert!(message.starts_with(start), "{name}: {message}");
            }
        }
    }
}

#[test]
fn pasted_base64_is_read_or_refused_with_the_place() {
    let folder = data("base64");
    let facts = json(&folder.join("facts.json"));
    let text = std::fs::read_to_string(folder.join("chat.jsonl")).unwrap();
    for (number, line) in (1..).zip(text.lines()) {
        let line: Value = serde_json::from_str(line).unwrap();
        let part = &line["messages"][0]["content"][0];
        let address = part["image"].as_str().or(part["image_url"]["url"].as_str()).unwrap();
        let source = PictureSource::from_text(address);
        let result = source.load(Path::new(""), &PictureLimits::default());
        match number {
            8 => {
                let message = result.unwrap_err().to_string();
                let place = address.find('!').unwrap() + 1;
                assert_eq!(message, format!("is not base64: '!' at character {place}"));
            }
            _ => assert_corners(&format!("line {number}"), &result.unwrap(), &facts["lines 1 to 5 and 9"], 0),
        }
    }
}

#[test]
fn huge_pictures_are_refused_before_they_are_decoded() {
    // A PNG of 60,000 x 60,000 pixels whose data would follow.
    let mut header = b"\0\0\0\x0dIHDR\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0".to_vec();
    let crc = flate_crc(&header[4..]);
    header.extend(crc.to_be_bytes());
    let bomb = [b"\x89PNG\r\n\x1a\n".as_slice(), &header, b"\0\0\0\0IDAT\x35\xaf\x06\x1e"].concat();
    let message = decode(&bomb).unwrap_err().to_string();
    assert!(message.starts_with("is 60000 x 60000 = 3600000000 pixels; at most 178956970 are allowed"), "{message}");

    let jpeg = std::fs::read(data("pillow/photo-420.jpg")).unwrap();
    let limits = PictureLimits { max_pixels: 2239, ..PictureLimits::default() };
    assert!(matches!(
        Picture::decode(&jpeg, &limits),
        Err(PictureFault::TooManyPixels { width: 56, height: 40, max_pixels: 2239 })
    ));
    let limits = PictureLimits { max_bytes: 100, ..PictureLimits::default() };
    assert!(matches!(Picture::decode(&jpeg, &limits), Err(PictureFault::TooManyBytes { max_bytes: 100, .. })));
    let source = PictureSource::Path(data("pillow/photo-420.jpg"));
    assert!(matches!(source.load(Path::new(""), &limits), Err(PictureFault::TooManyBytes { .. })));
}

/// The checksum of PNG chunks, bit by bit.
fn flate_crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 })
    })
}

#[test]
fn kinds_that_are_not_read_are_named() {
    let jpeg = std::fs::read(data("pillow/photo-444.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    for (marker, kind) in [(0xc9, "arithmetic coding"), (0xc3, "lossless or hierarchical")] {
        let mut content = jpeg.clone();
        content[frame + 1] = marker;
        let message = decode(&content).unwrap_err().to_string();
        assert!(message.contains(kind), "{message}");
    }
    let mut content = jpeg;
    content[frame + 4] = 12;
    assert!(decode(&content).unwrap_err().to_string().contains("12-bit samples"));
    for (content, kind) in [(b"BM..".as_slice(), "a BMP"), (b"%PDF-1.7", "a PDF"), (b"\x1f\x8b\x08\0", "gzip")] {
        assert!(decode(content).unwrap_err().to_string().contains(kind));
    }
    let web = PictureSource::from_text("https://example.org/cat.png").load(Path::new(""), &PictureLimits::default());
    assert!(matches!(web, Err(PictureFault::WebAddress)));
}

#[test]
fn samples_must_fit_the_size() {
    assert!(matches!(Picture::from_rgb(2, 2, vec![0; 11]), Err(PictureFault::WrongLength { found: 11, .. })));
    assert!(matches!(Picture::from_rgb(0, 2, vec![]), Err(PictureFault::Empty)));
    assert_eq!(Picture::from_rgb(1, 2, vec![1, 2, 3, 4, 5, 6]).unwrap().pixel(0, 1), [4, 5, 6]);
}
